"""The prediction of drafting ahead, and how long to wait for what was drafted."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.speculation.ahead import (
    OUTCOMES,
    AheadModel,
    OutcomeHits,
    Unfinished,
    max_budget,
    tokens_after_hit,
    tokens_after_miss,
)
from coordinator.speculation.costs import CostModel, StepCosts
from tandem.types import MAX_AHEAD_TOKENS, AheadBudget, StepProfile

_EXPECTED = [1.0, 1.75, 2.3, 2.7, 3.0]


def _costs(draft_seconds: float, per_row: float = 0.0125) -> CostModel:
    sizes = [(sequences, tokens) for sequences in (1, 8) for tokens in (1, 9)]
    verify = StepProfile(dict.fromkeys(sizes, 6.5e-3))
    draft = StepProfile({(n, k): draft_seconds * (1.0 + per_row * (n * k - 1)) for n, k in sizes})
    return CostModel(StepCosts(verify), StepCosts(draft), 0.25e-3, 0.25e-3)


def _best(costs: CostModel, model: AheadModel, load: int = 1) -> int:
    return max(OUTCOMES, key=lambda count: model.speed(costs, load, _EXPECTED, count))


def test_a_fast_draft_serves_many_outcomes_and_a_slow_one_few() -> None:
    assert _best(_costs(0.3e-3), AheadModel()) == 16
    assert _best(_costs(1.2e-3, per_row=0.25), AheadModel()) <= 4


def test_outcomes_that_never_come_are_not_drafted_for() -> None:
    model = AheadModel()
    for _ in range(500):
        model.hits.add(0, 16)
    assert model.hits.share(1) > 0.9
    assert _best(_costs(1.0e-3, per_row=1.0), model) == 1


def test_shares_follow_the_observed_outcomes() -> None:
    hits, chance = OutcomeHits(), random.Random(1)
    for _ in range(4000):
        rank = chance.choices([0, 1, 2, 3, None], [0.4, 0.2, 0.1, 0.1, 0.2])[0]
        hits.add(rank, 4)
    assert hits.share(1) == pytest.approx(0.4, abs=0.04)
    assert hits.share(4) == pytest.approx(0.8, abs=0.04)
    assert hits.share(64) >= hits.share(4)


@pytest.mark.parametrize("load", [1, 8])
def test_the_factor_compares_both_ways(load: int) -> None:
    model, chance = AheadModel(), random.Random(3)

    def count(rounds: int, predicted: float, *, is_ahead: bool) -> None:
        for _ in range(rounds * load):
            model.calibration(is_ahead=is_ahead).add(load, 2.0, predicted * chance.uniform(0.7, 1.3))

    count(100, 4.0, is_ahead=True)
    assert model.factor(load) == pytest.approx(0.5, abs=0.05)
    assert model.factor(4) == model.factor(load), "the nearest load's"
    assert AheadModel(model).factor(load) == pytest.approx(model.factor(load))
    count(100, 4.0, is_ahead=False)
    assert model.factor(load) == pytest.approx(1.0, abs=0.1), "the machine is slow, not drafting ahead"
    count(6, 2.0, is_ahead=True)
    slow = model.factor(load)
    model.calibration(is_ahead=True).doubt(load, 2.0)
    count(6, 2.0, is_ahead=True)
    assert model.factor(load) > 1.6 > slow, "after doubt, few rounds tell"


def test_a_pause_of_the_machine_hardly_moves_the_factor() -> None:
    model = AheadModel()
    for _ in range(50):
        model.calibration(is_ahead=True).add(1, 2.0, 2.0)
    model.calibration(is_ahead=True).add(1, 2.0, 2000.0)
    assert model.factor(1) > 0.9


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
        costs = CostModel(known.target, known.draft, 0.5e-3, 0.5e-3, leads, leads)
        return AheadModel().speed(costs, 1, _EXPECTED, 4)

    assert speed(0.8e-3, leads=True) > 1.01 * speed(0.8e-3, leads=False)
    assert speed(6.0e-3, leads=True) == pytest.approx(speed(6.0e-3, leads=False))
