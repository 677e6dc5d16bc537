"""A paced target and an observed draft with tiny models, and coordinators over them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

import grpc

from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.speculation.ahead import DraftAhead
from draft_service.servicer import DraftedFor, DraftServicer
from tandem.engine.models.loading import LoadedModel
from tandem.types import Finish, GenerationRequest, Proposal, ProposeStep
from tandem.wire.draft import Answer
from tests.end_to_end.models import random_model
from tests.service.clients import Completed, complete_all, until
from tests.service.engines import Faults, draft, target
from tests.service.fakes import coordinator, hooked, refusal

SECONDS = 120.0


STEP_SECONDS = 0.008
"""Minimum duration of a step of the target, in which the draft can draft ahead."""


TOKENS = 24


PROMPT = (3, 4)


GREEDY = GenerationRequest(
    PROMPT, max_tokens=TOKENS, temperature=0.0, num_speculative_tokens=3, ignore_eos=True
)


SAMPLED = replace(GREEDY, temperature=1.0, top_k=4, seed=5)


REQUESTS = {
    "greedy": GREEDY,
    **{rule: replace(SAMPLED, rejection_sampling_strategy=rule) for rule in ("strict", "residual", "block")},
}


def small_target() -> Any:
    """Return a model of six tokens with random weights, scaled up so that some tokens are far more probable.

    Its most probable continuation of the prompt has five different tokens, without a period.
    """
    return random_model(
        10,
        vocab_size=6,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
    )


class ObservedDraft(DraftServicer):
    """A draft that counts its messages, and ends its sequences at some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = 0
        self.pushes = 0
        self.requested = 0
        """Steps that requested a proposal."""
        self.running = 0
        self.breaks_at: set[int] = set()
        """Pushes at which a sequence fails, counted over all sequences."""
        self.leaves_at: set[int] = set()
        """Pushes at which a sequence ends without an error."""

    async def serve_sequence(self, sequence: DraftedFor) -> None:
        def on_step(step: ProposeStep) -> None:
            self.requested += step.token_count > 0

        def on_answer(answer: Answer) -> Answer:
            if isinstance(answer, Proposal):
                self.answers += 1
                return answer
            self.pushes += 1
            if self.pushes in self.breaks_at:
                sequence.tell(refusal(grpc.StatusCode.UNAVAILABLE, "gone"))
            if self.pushes in self.leaves_at:
                sequence.tell(Finish(0))
            return answer

        self.running += 1
        try:
            await super().serve_sequence(hooked(sequence, on_step, on_answer))
        finally:
            self.running -= 1


class Pair:
    """Any number of paced targets and a draft; runs coordinators over them."""

    def __init__(self, targets: list[str], drafting: str, observed: ObservedDraft) -> None:
        self._targets = targets
        self._drafting = drafting
        self.draft = observed

    @asynccontextmanager
    async def coordinated(
        self, ahead: DraftAhead, policy: Literal["fixed", "adaptive"] = "fixed"
    ) -> AsyncIterator[str]:
        settings = CoordinatorSettings(
            target_address=",".join(self._targets),
            draft_address=self._drafting,
            draft_patience_seconds=30.0,
            speculation_policy=policy,
            draft_ahead=ahead,
        )
        async with coordinator(settings) as (address, service):
            yield address
            await until(
                lambda: not any(each.open_sequences for each in service.replicas.snapshots()), SECONDS
            )

    async def completed(self, ahead: DraftAhead, *requests: GenerationRequest) -> list[Completed]:
        """Complete one request after the other, each on dedicated streams."""
        async with self.coordinated(ahead) as address:
            return await complete_all(address, requests, at_once=1)


@asynccontextmanager
async def pair(
    target_model: LoadedModel,
    draft_model: LoadedModel,
    *faults: Faults,
    step_seconds: float = STEP_SECONDS,
    max_sequences: int = 8,
    draft_top_k: int = 3,
) -> AsyncIterator[Pair]:
    observed = ObservedDraft()
    async with asyncio.timeout(SECONDS), AsyncExitStack() as stack:
        targets = [
            (await stack.enter_async_context(target(target_model, each, step_seconds, max_sequences)))[0]
            for each in faults or (Faults(),)
        ]
        drafting, _ = await stack.enter_async_context(
            draft(draft_model, observed, draft_top_k, max_sequences)
        )
        yield Pair(targets, drafting, observed)


def hits(completed: list[Completed]) -> int:
    """Return the number of rounds whose proposal was drafted ahead."""
    return sum(each.stats.ahead.hits for each in completed)
