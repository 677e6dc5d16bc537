"""The gain of drafting ahead, and the number of outcomes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.speculation.ahead import (
    AheadChoice,
    BranchCosts,
    OutcomeHits,
    RequestAhead,
    Unfinished,
    branches,
    tokens_after_hit,
    tokens_after_miss,
)
from coordinator.speculation.controller import Choice
from coordinator.speculation.costs import CostModel, StepCosts
from coordinator.speculation.gains import AcceptanceModel
from coordinator.stats.rounds import RoundCost
from tandem.types import MAX_AHEAD_TOKENS, AheadBudget

_EXPECTED = [1.0, 1.75, 2.3, 2.7, 3.0]


def _branches(draft_seconds: float, hits: OutcomeHits | None = None, costs: BranchCosts | None = None) -> int:
    return branches(
        hits or OutcomeHits(),
        costs or BranchCosts(),
        tokens=4,
        expected=_EXPECTED,
        verify_seconds=6.5e-3,
        draft_seconds=draft_seconds,
        rest_seconds=0.5e-3,
    )


def test_a_fast_draft_serves_many_outcomes_and_a_slow_one_few() -> None:
    assert _branches(0.3e-3) == 16
    costs = BranchCosts()
    for count, seconds in ((1, 1.2e-3), (2, 1.3e-3), (4, 1.5e-3), (8, 2.6e-3), (16, 5.2e-3)):
        costs.add(count, seconds)
    assert _branches(1.2e-3, costs=costs) <= 4


def test_outcomes_that_never_come_are_not_drafted_for() -> None:
    hits = OutcomeHits()
    for _ in range(500):
        hits.add(0, 16)
    costs = BranchCosts()
    for count, seconds in ((1, 1.0e-3), (2, 1.4e-3), (4, 2.0e-3), (8, 3.0e-3), (16, 5.0e-3)):
        costs.add(count, seconds)
    assert hits.share(1) > 0.9
    assert _branches(1.0e-3, hits, costs) == 1


def test_shares_follow_the_observed_outcomes() -> None:
    hits, chance = OutcomeHits(), random.Random(1)
    for _ in range(4000):
        rank = chance.choices([0, 1, 2, 3, None], [0.4, 0.2, 0.1, 0.1, 0.2])[0]
        hits.add(rank, 4)
    assert hits.share(1) == pytest.approx(0.4, abs=0.04)
    assert hits.share(4) == pytest.approx(0.8, abs=0.04)
    assert hits.share(64) >= hits.share(4)


def _simulated(choice: AheadChoice, rounds: int, on_seconds: float, off_seconds: float) -> float:
    """Share of the rounds that drafted ahead."""
    chance, drafted_ahead = random.Random(2), 0
    for _ in range(rounds):
        is_on = choice.begin_round()
        drafted_ahead += is_on
        seconds = (on_seconds if is_on else off_seconds) * chance.uniform(0.8, 1.2)
        choice.end_round(was_on=is_on, tokens=3.0, seconds=seconds)
    return drafted_ahead / rounds


@pytest.mark.parametrize(("on", "off", "low", "high"), [(7.0, 10.0, 0.95, 1.0), (12.0, 10.0, 0.0, 0.08)])
def test_the_faster_mode_gets_nearly_all_rounds(on: float, off: float, low: float, high: float) -> None:
    choice = AheadChoice(1)
    assert low <= _simulated(choice, 3000, on, off) <= high
    assert choice.is_on == (on < off)
    assert choice.gain == pytest.approx(off / on, rel=0.1)


def test_the_choice_follows_a_change_of_the_machine() -> None:
    choice = AheadChoice(1)
    _simulated(choice, 1000, 7.0, 10.0)
    assert choice.is_on
    _simulated(choice, 12000, 12.0, 10.0)
    assert not choice.is_on


def test_a_long_proposal_grants_no_more_than_a_draft_takes() -> None:
    """Proposals may have 128 tokens, budgets 64; a draft refuses larger budgets."""
    ahead = RequestAhead(8, OutcomeHits(), BranchCosts())
    assert ahead.max_budget(128) == AheadBudget(8, MAX_AHEAD_TOKENS)
    choice = Choice(CostModel(StepCosts(), StepCosts()), AcceptanceModel(), load=1, max_tokens=128)
    assert ahead.begin_round(AheadChoice(1))
    assert ahead.budget(128, choice) == AheadBudget(8, MAX_AHEAD_TOKENS)
    assert ahead.budget(3, choice) == AheadBudget(8, 3)


@pytest.mark.parametrize("load", [1, 8])
def test_the_budget_does_not_shrink_with_sequences_that_share_the_drafts_steps(load: int) -> None:
    costs, gains = CostModel(StepCosts(), StepCosts()), AcceptanceModel()
    verify, draft = 8e-3, 1e-3
    for proposed in (0, 4) * 8:
        seconds = verify + proposed * draft + 1e-3
        costs.add(
            load,
            RoundCost(proposed, seconds, verify, load, load * (proposed + 1), proposed * draft, load),
        )
        gains.add(4, 3)
    choice = Choice(costs, gains, load, max_tokens=4)
    ahead = RequestAhead("auto", OutcomeHits(), BranchCosts())
    choice.begin_round()
    ways = AheadChoice(load)
    while not ahead.begin_round(ways):
        pass
    assert ahead.budget(4, choice) == AheadBudget(16, 4)


@pytest.mark.parametrize(
    ("draft_ms", "tokens_per_second", "count"), [(0.1, 300.0, 4), (1.2, 300.0, 3), (4.0, 300.0, 0)]
)
def test_a_round_asks_after_a_miss_for_as_many_tokens_as_pay(
    draft_ms: float, tokens_per_second: float, count: int
) -> None:
    found = tokens_after_miss(
        _EXPECTED,
        [0.0] * 5,
        counts=range(5),
        draft_seconds=draft_ms / 1e3,
        wait_seconds=0.5e-3,
        tokens_per_second=tokens_per_second,
    )
    assert found == count


def test_a_fixed_policy_asks_for_all_or_nothing_after_a_miss() -> None:
    def chosen(wait_ms: float) -> int:
        return tokens_after_miss(
            _EXPECTED,
            [6.5e-3 + 0.1e-3 * count for count in range(5)],
            counts=(0, 4),
            draft_seconds=1.2e-3,
            wait_seconds=wait_ms / 1e3,
            tokens_per_second=300.0,
        )

    assert (chosen(0.5), chosen(3.0)) == (4, 0)


def test_rows_that_cost_as_much_as_they_bring_are_not_asked_for() -> None:
    found = tokens_after_miss(
        _EXPECTED,
        [0.0, 1e-3, 2e-3, 5e-3, 9e-3],
        counts=range(5),
        draft_seconds=0.1e-3,
        wait_seconds=0.1e-3,
        tokens_per_second=300.0,
    )
    assert found == 2


@pytest.mark.parametrize(
    ("ready", "due_ms", "step_ms", "count"),
    [
        (2, 0.1, 0.1, 4),  # nearly free
        (
            2,
            0.2,
            1.2,
            3,
        ),  # 0.4 tokens for 0.2 ms, then 0.3 for 1.2 ms, where rounds make 0.3 in a millisecond
        (2, 1.5, 1.5, 2),  # too slow
        (4, 0.0, 0.1, 4),  # complete
    ],
)
def test_a_round_waits_after_a_hit_for_as_many_tokens_as_pay(
    ready: int, due_ms: float, step_ms: float, count: int
) -> None:
    unfinished = Unfinished(ready, 4, due_ms / 1e3, step_ms / 1e3)
    assert tokens_after_hit(_EXPECTED, unfinished, tokens_per_second=300.0) == count


@given(st.integers(0, 4), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 1e4))
def test_a_wait_is_never_for_fewer_tokens_than_are_ready(
    ready: int, due: float, step: float, tokens_per_second: float
) -> None:
    found = tokens_after_hit(_EXPECTED, Unfinished(ready, 4, due, step), tokens_per_second=tokens_per_second)
    assert ready <= found <= 4
