"""A fake draft that drafts ahead, and a cluster around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.speculation.ahead import DraftAhead
from draft_service.servicer import DraftedFor
from tandem.client import Client
from tandem.types import DraftedOutcomes, GenerationRequest, Proposal, ProposeStep
from tandem.v1 import draft_pb2_grpc, target_pb2_grpc
from tests.fault_proxy import fault_proxy
from tests.service.clients import Completed, complete, until
from tests.service.fakes import FakeDraft, FakeTarget, coordinating, serving

SECONDS = 60.0


TOKENS = 50


EXPECTED = tuple(range(11, 11 + TOKENS))


REQUEST = GenerationRequest((10,), max_tokens=TOKENS, temperature=0.0, num_speculative_tokens=2)


Pushes = Iterator[DraftedOutcomes | Proposal]


class AheadDraft(FakeDraft):
    """Pushes the outcome that will occur, one token per message, as soon as it has a budget."""

    depth_seconds = 0.0
    """Time after each depth of the outcomes."""

    def __init__(self) -> None:
        super().__init__()
        self.model_info = replace(self.model_info, drafts_ahead=True)
        self.granted = 0
        """Rounds for which it received a budget."""
        self.silent_from = 1 << 30
        """From this round on the draft sends neither answers nor outcomes."""

    def honest(self, tokens: list[int], step: ProposeStep) -> Iterator[DraftedOutcomes]:
        """Continue the outcome that the verification of the last tokens will have."""
        assert step.ahead is not None
        proposed = step.proposed_count or step.token_count
        base = len(tokens) - proposed
        bonus = tokens[-1] + 1
        for depth in range(step.ahead.token_count):
            keys = ((proposed,), (bonus,)) if depth == 0 else ((), ())
            yield DraftedOutcomes(base, depth, (bonus + 1 + depth,), *keys)

    def pushes(self, tokens: list[int], step: ProposeStep) -> Pushes:
        """Return what to push for the round. Tests override this to violate the protocol."""
        yield from self.honest(tokens, step)

    async def serve_sequence(self, sequence: DraftedFor) -> None:
        self.running += 1
        try:
            tokens = self.begin(sequence.options.max_length)
            async for step in sequence.steps():
                self.apply(tokens, step.delta)
                if self.granted >= self.silent_from:
                    continue
                if step.is_answered:
                    self.requested.append(step.token_count)
                    answer = self.proposal(tokens, step.token_count)
                    tokens += answer.token_ids
                    await sequence.answer(answer)
                if step.ahead is not None:
                    self.granted += 1
                    for push in self.pushes(tokens, step):
                        await sequence.answer(push)
                        await asyncio.sleep(self.depth_seconds)
            self.finished += 1
        finally:
            self.running -= 1


@asynccontextmanager
async def cluster(
    draft: FakeDraft,
    *,
    ahead: DraftAhead = 4,
    step_seconds: float = 0.01,
    patience: float = 30.0,
    delay: float = 0.0,
    keeps_proposals: bool = False,
) -> AsyncIterator[Client]:
    """Connect a client to a coordinator over a counting target and this draft, `delay` seconds away (one way).

    With `keeps_proposals` the length of proposals must not depend on time, and all of them are accepted.
    """
    target = FakeTarget()
    target.step_seconds = step_seconds
    async with asyncio.timeout(SECONDS), AsyncExitStack() as stack:
        target_address, _ = await stack.enter_async_context(
            serving(lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(target, server))
        )
        draft_address, _ = await stack.enter_async_context(
            serving(lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, server))
        )
        if delay:
            proxy = await stack.enter_async_context(fault_proxy(draft_address))
            proxy.delay_seconds, draft_address = delay, proxy.address
        settings = CoordinatorSettings(
            target_address=target_address,
            draft_address=draft_address,
            draft_patience_seconds=patience,
            speculation_policy="fixed",
            draft_ahead=ahead,
            rejection_sampling_strategy="synthetic" if keeps_proposals else None,
            synthetic_acceptance_rate=1.0 if keeps_proposals else None,
        )
        address = await stack.enter_async_context(coordinating(settings))
        yield await stack.enter_async_context(Client(address))
        await until(lambda: not draft.running, SECONDS)


async def completed(draft: FakeDraft, **options: float) -> Completed:
    """Complete the request with this draft."""
    async with cluster(draft, **options) as client:  # type: ignore[arg-type]
        return await complete(client, REQUEST)
