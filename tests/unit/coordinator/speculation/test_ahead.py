"""The prediction of drafting ahead, and how long to wait for what was drafted."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.speculation.ahead import (
    OUTCOMES,
    Unfinished,
    max_budget,
    tokens_after_hit,
    tokens_after_miss,
)
from coordinator.speculation.costs import CostModel, StepCosts
from coordinator.speculation.gains import GainModel
from tandem.types import MAX_AHEAD_TOKENS, AheadBudget, StepProfile

_EXPECTED = [1.0, 1.75, 2.3, 2.7, 3.0]


def _costs(draft_seconds: float, per_row: float = 0.0125) -> CostModel:
    sizes = [(sequences, tokens) for sequences in (1, 8) for tokens in (1, 9)]
    verify = StepProfile(dict.fromkeys(sizes, 6.5e-3))
    draft = StepProfile({(n, k): draft_seconds * (1.0 + per_row * (n * k - 1)) for n, k in sizes})
    return CostModel(StepCosts(verify), StepCosts(draft), 0.25e-3, 0.25e-3)


def _best(costs: CostModel, gains: GainModel, load: int = 1) -> int:
    return min(OUTCOMES, key=lambda count: costs.seconds_ahead(load, _EXPECTED, count, gains.hit_rate(count)))


def test_a_fast_draft_serves_many_outcomes_and_a_slow_one_few() -> None:
    assert _best(_costs(0.3e-3), GainModel()) == 16
    assert _best(_costs(1.2e-3, per_row=0.25), GainModel()) <= 4


def test_outcomes_that_never_come_are_not_drafted_for() -> None:
    gains = GainModel()
    for _ in range(500):
        gains.add_outcome(0, 16)
    assert gains.hit_rate(1) > 0.9
    assert _best(_costs(1.0e-3, per_row=1.0), gains) == 1


def test_hit_rates_follow_the_observed_outcomes() -> None:
    gains, chance = GainModel(), random.Random(1)
    for _ in range(4000):
        rank = chance.choices([0, 1, 2, 3, None], [0.4, 0.2, 0.1, 0.1, 0.2])[0]
        gains.add_outcome(rank, 4)
    assert gains.hit_rate(1) == pytest.approx(0.4, abs=0.04)
    assert gains.hit_rate(4) == pytest.approx(0.8, abs=0.04)
    assert gains.hit_rate(64) >= gains.hit_rate(4)


def test_a_long_proposal_grants_no_more_than_a_draft_takes() -> None:
    """Proposals may have 128 tokens, budgets 64; a draft refuses larger budgets."""
    assert max_budget(8, 128) == AheadBudget(8, MAX_AHEAD_TOKENS)
    assert max_budget("auto", 3) == AheadBudget(OUTCOMES[-1], 3)
    assert max_budget("off", 3) is None


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


def test_a_target_that_goes_on_with_proposals_hides_the_way_to_it() -> None:
    """Unless the draft, which learns outcomes that much later, takes longer than the verification."""

    def speed(draft_seconds: float, *, leads: bool) -> float:
        known = _costs(draft_seconds)
        costs = CostModel(known.target, known.draft, 0.5e-3, 0.5e-3, leads)
        return 1.0 / costs.seconds_ahead(1, _EXPECTED, 4, GainModel().hit_rate(4), leads=leads)

    assert speed(0.8e-3, leads=True) > 1.01 * speed(0.8e-3, leads=False)
    assert speed(6.0e-3, leads=True) == pytest.approx(speed(6.0e-3, leads=False))


def test_three_tokens_in_time_for_a_target_that_goes_on_make_less_than_four_that_it_waits_for() -> None:
    """A round that the draft is late for is asked for; it does not cost each token of the proposal once more."""
    known = _costs(1.2e-3, per_row=0.0)
    costs = CostModel(known.target, known.draft, 1.3e-3, 1.3e-3, leads=True)
    three, four = (
        made[-1] / costs.seconds_ahead(1, made, 16, 0.96, leads=True) for made in (_EXPECTED[:4], _EXPECTED)
    )
    assert four > three
