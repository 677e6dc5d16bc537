"""Drafting ahead with fake drafts: hits need no request, and a late or distant draft costs nothing.

The target counts, so that an honest draft knows every outcome: the whole proposal is accepted, and the next number
follows.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from coordinator.speculation.controller import RequestSpeculation
from tandem.types import GenerationRequest, ProposeStep, StepCost
from tests.service.ahead_draft import AheadDraft, Pushes, completed
from tests.service.clients import complete, until
from tests.service.fakes import FakeDraft, FakeTarget
from tests.service.served import NOT_SERVING, fleet

SECONDS = 60.0
TOKENS = 50
EXPECTED = tuple(range(11, 11 + TOKENS))
REQUEST = GenerationRequest((10,), max_tokens=TOKENS, temperature=0.0, num_speculative_tokens=2)
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


async def test_a_round_with_a_hit_needs_no_proposal_request() -> None:
    draft = AheadDraft()
    done = await completed(draft)
    assert done.token_ids == EXPECTED
    assert done.stats.accepted == done.stats.drafted > TOKENS / 2
    assert proposal_requests(draft) + done.stats.ahead.hits <= done.stats.rounds
    assert done.stats.ahead.hits >= done.stats.rounds - 4, (
        "all rounds but that of the prompt, the first and the last"
    )
    assert draft.finished == 1


async def test_a_draft_that_never_has_an_outcome_ready_is_asked_every_second_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long its answers seem to take: what the wait costs was measured beside other work of the draft."""
    monkeypatch.setattr(RequestSpeculation, "tokens_after_miss", lambda *_: 0)
    draft = PushingNothing()
    done = await completed(draft)
    assert done.token_ids == EXPECTED
    assert draft.granted > 0
    assert done.stats.ahead.hits == 0
    assert (done.stats.rounds - 2) // 2 <= proposal_requests(draft) < done.stats.rounds - 2


class PushingNothing(AheadDraft):
    """Knows budgets, and never gets to use them."""

    def pushes(self, tokens: list[int], step: ProposeStep) -> Pushes:
        return iter(())


async def test_a_draft_pushes_nothing_without_a_budget() -> None:
    draft = AheadDraft()
    done = await completed(draft, ahead="off")  # type: ignore[arg-type]
    assert done.token_ids == EXPECTED
    assert draft.granted == 0
    assert proposal_requests(draft) == done.stats.drafted / 2 > TOKENS / 4, "each proposal was asked for"


async def test_hits_hide_the_round_trip_to_a_distant_draft() -> None:
    """The draft is 20 ms away (one way), and a target step outlasts the round trip: most rounds have hits."""
    draft = AheadDraft()
    done = await completed(draft, delay=0.02, step_seconds=0.1)
    assert done.token_ids == EXPECTED
    assert done.stats.ahead.hits >= done.stats.rounds / 2
    assert proposal_requests(draft) + done.stats.ahead.hits <= done.stats.rounds


async def test_a_round_waits_for_the_last_token_of_a_continuation(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of the draft ends before the verification, and the other one soon after it."""
    monkeypatch.setattr(RequestSpeculation, "tokens_after_miss", lambda _, count: count)
    draft = StepwiseDraft()
    done = await completed(draft, step_seconds=1.6 * STEP_SECONDS)
    assert done.token_ids == EXPECTED
    assert done.stats.ahead.hits >= done.stats.rounds / 2
    assert done.stats.drafted >= 1.5 * done.stats.rounds, "most rounds verify both tokens"


async def test_where_proposals_must_not_depend_on_time_a_round_waits_for_the_whole_continuation() -> None:
    draft = StepwiseDraft()
    done = await completed(draft, step_seconds=1.6 * STEP_SECONDS, keeps_proposals=True)
    assert done.token_ids == EXPECTED
    assert done.stats.ahead.hits >= done.stats.rounds / 2, "a shorter continuation would be a miss"


async def test_a_silent_draft_is_waited_for_once(caplog: pytest.LogCaptureFixture) -> None:
    """The draft stops sending, as a stopped process would: outcomes that it pushed before still count."""
    caplog.set_level(logging.INFO)
    draft = AheadDraft()
    draft.silent_from = 4
    done = await completed(draft, patience=0.1)
    assert done.token_ids == EXPECTED
    assert done.stats.ahead.hits > 0
    assert [record.message for record in caplog.records].count("draft late") == 1


@pytest.mark.parametrize("way", ["stops", "drains"])
async def test_a_draft_that_leaves_with_outcomes_outstanding_is_replaced(way: str) -> None:
    target, drafts = FakeTarget(), [AheadDraft(), AheadDraft()]
    target.step_seconds = 0.03
    async with asyncio.timeout(SECONDS), fleet(target, *drafts, ahead=8) as (client, services):
        task = asyncio.create_task(complete(client, REQUEST))
        await until(lambda: sum(each.granted for each in drafts) > 2, SECONDS)
        going, other = sorted(services[1:], key=lambda each: -each.fake.running)
        await (going.stop() if way == "stops" else going.say(NOT_SERVING))
        await until(lambda: other.fake.running == 1, SECONDS)
        assert not task.done()
        done = await task
        await until(lambda: not any(each.running for each in drafts), SECONDS)
    assert done.token_ids == EXPECTED
    assert all(each.granted for each in drafts)
