"""Drafting ahead with fake drafts: hits need no request, and late, distant or wrong drafts cost nothing."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from coordinator.speculation.controller import RequestSpeculation
from tandem.types import ProposeStep, StepCost
from tests.service.ahead_draft import (
    EXPECTED,
    AheadDraft,
    Pushes,
    ViolatingDraft,
    Violation,
    completed,
    wrong_tokens,
)
from tests.service.fakes import FakeDraft

STEP_SECONDS = 0.02


def proposal_requests(draft: FakeDraft) -> int:
    """Count the steps that ask for a proposal; others only let the draft read the sequence."""
    return sum(count > 0 for count in draft.requested)


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
    monkeypatch.setattr(RequestSpeculation, "tokens_after_miss", lambda *_: 0)
    draft = PushingNothing()
    done = await completed(draft)
    assert done.token_ids == EXPECTED
    assert draft.granted > 0
    assert done.speculation.ahead.hits == 0
    assert (done.speculation.rounds - 2) // 2 <= proposal_requests(draft) < done.speculation.rounds - 2


class PushingNothing(AheadDraft):
    """Knows budgets, and never gets to use them."""

    def pushes(self, tokens: list[int], step: ProposeStep) -> Pushes:
        return iter(())


async def test_a_round_waits_for_the_last_token_of_a_continuation(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of the draft ends before the verification, and the other one soon after it."""
    monkeypatch.setattr(RequestSpeculation, "tokens_after_miss", lambda _, count: count)
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


def of_the_past(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    """Name a round before the first, of which no outcomes can be late."""
    for each in draft.honest(tokens, step):
        yield replace(each, base_length=each.base_length - 1)


def endless_past(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    for _ in range(100_000):
        yield from of_the_past(draft, tokens, step)


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
