"""Drafting ahead with fake drafts: hits need no request, and late, distant or wrong drafts cost nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tandem.clients.client import Completed
from tandem.model.types import DraftedOutcomes, GenerationRequest, Proposal, ProposeStep, StepCost
from tandem_coordinator.controller import RequestController
from tandem_draft.servicer import DraftedFor
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


STEP_SECONDS = 0.02


class StepwiseDraft(AheadDraft):
    """Takes so long for each depth of its outcomes."""

    depth_seconds = STEP_SECONDS

    def pushes(self, tokens: list[int], step: ProposeStep) -> Pushes:
        for each in self.honest(tokens, step):
            yield replace(each, cost=StepCost(STEP_SECONDS, 1, 1))


async def test_a_draft_that_never_has_an_outcome_ready_is_asked_every_second_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long its answers seem to take: what the wait costs was measured beside other work of the draft."""
    monkeypatch.setattr(RequestController, "tokens_after_miss", lambda *_: 0)
    draft = ViolatingDraft(lambda *_: iter(()))  # it knows budgets, and never gets to use them
    done = await completed(draft)
    assert done.token_ids == EXPECTED
    assert draft.granted > 0
    assert done.speculation.ahead.hits == 0
    proposals = sum(count > 0 for count in draft.requested)  # other steps only let it read the sequence
    assert (done.speculation.rounds - 2) // 2 <= proposals < done.speculation.rounds - 2


async def test_a_round_waits_for_the_last_token_of_a_continuation(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of the draft ends before the verification, and the other one soon after it."""
    monkeypatch.setattr(RequestController, "tokens_after_miss", lambda _, count: count)
    draft = StepwiseDraft()
    done = await completed(draft, step_seconds=1.6 * STEP_SECONDS)
    assert done.token_ids == EXPECTED
    assert done.speculation.ahead.hits >= done.speculation.rounds / 2
    assert done.speculation.drafted >= 1.25 * done.speculation.rounds, "many rounds verify both tokens"


async def test_a_silent_draft_is_waited_for_once(caplog: pytest.LogCaptureFixture) -> None:
    """The draft stops sending, as a stopped process would: outcomes that it pushed before still count."""
    caplog.set_level(logging.INFO)
    draft = AheadDraft()
    draft.silent_from = 4
    done = await completed(draft, draft_patience_seconds=0.1)
    assert done.token_ids == EXPECTED
    assert done.speculation.ahead.hits > 0
    assert [record.message for record in caplog.records].count("draft late") == 1


def endless_past(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    """Name a round before the first, of which no outcomes can be late, again and again."""
    for _ in range(100_000):
        for each in draft.honest(tokens, step):
            yield replace(each, base_length=each.base_length - 1)


def wrong_lead(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    first = next(draft.honest(tokens, step))
    assert step.ahead is not None
    yield replace(first, lead_token_ids=(1,) * (step.ahead.token_count - 1))


def unasked_proposal(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    yield draft.proposal(tokens, 2)


HARMLESS: tuple[Violation, ...] = (wrong_tokens, wrong_lead)
FATAL: tuple[Violation, ...] = (endless_past, unasked_proposal)
"""Unit tests of `PendingOutcomes` refuse the others."""


@pytest.mark.parametrize("violation", [*HARMLESS, *FATAL], ids=lambda violation: violation.__name__)
async def test_a_violation_costs_the_draft_its_place_and_the_request_nothing(
    violation: Violation, caplog: pytest.LogCaptureFixture
) -> None:
    draft = ViolatingDraft(violation)
    done = await completed(draft, step_seconds=0.003)
    assert done.token_ids == EXPECTED
    lost = [record for record in caplog.records if record.message == "draft lost"]
    assert draft.granted > 0
    if violation in HARMLESS:
        assert not lost
    else:
        assert lost
        assert all(
            "draft service: " in vars(record)["reason"] or "outcomes" in vars(record)["reason"]
            for record in lost
        )
        assert draft.opened <= 1 + len(lost)
