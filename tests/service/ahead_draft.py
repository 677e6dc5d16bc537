"""A fake draft that drafts ahead, and a cluster around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from draft_service.servicer import DraftedFor
from tandem.client import Completed
from tandem.types import DraftedOutcomes, GenerationRequest, Proposal, ProposeStep
from tests.service.clients import complete, until
from tests.service.fakes import FakeDraft, fleet, paced

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


Violation = Callable[[AheadDraft, list[int], ProposeStep], Pushes]


def wrong_tokens(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    """Name the right outcome, and continue it with a token that the target rejects."""
    for each in draft.honest(tokens, step):
        yield replace(each, token_ids=(7,))


class ViolatingDraft(AheadDraft):
    """Answers requests correctly, and violates the protocol in what it drafts ahead."""

    def __init__(self, violation: Violation) -> None:
        super().__init__()
        self._violation = violation

    def pushes(self, tokens: list[int], step: ProposeStep) -> Pushes:
        yield from self._violation(self, tokens, step)


async def completed(draft: FakeDraft, *, step_seconds: float = 0.01, **options: Any) -> Completed:
    """Complete the request over a counting target and this draft, in one stream."""
    target = paced(step_seconds)
    async with fleet(target, draft, **{"draft_ahead": 4} | options) as (client, *_):
        done = await complete(client, REQUEST)
        await until(lambda: not draft.running)
    return done
