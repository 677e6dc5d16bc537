"""The cost model and the gain model, each alone."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.speculation.cost_model import CostModel
from coordinator.speculation.gain_model import (
    FIRST_RATE,
    AcceptanceModel,
    RequestAcceptance,
    expected_tokens,
)
from coordinator.speculation.linear_cost import LinearCost
from coordinator.stats.rounds import RoundCost


@pytest.mark.parametrize(
    "coefficients", [(0.01, 0.001, 0.0005), (0.01, 0.0, 0.0), (0.0, 0.0, 0.002), (0.0, 0.003, 0.0)]
)
def test_a_linear_cost_is_recovered(coefficients: tuple[float, float, float]) -> None:
    constant, per_a, per_b = coefficients
    cost = LinearCost()
    for a in (1, 2, 4, 8, 16):
        for b in (a, 3 * a, 5 * a):
            for _ in range(4):
                cost.add(a, b, constant + per_a * a + per_b * b)
    for a, b in ((1, 1), (3, 9), (12, 48), (32, 64)):
        assert cost.predict(a, b) == pytest.approx(constant + per_a * a + per_b * b, rel=0.05)


def test_a_pause_of_the_machine_does_not_count_as_cost() -> None:
    cost = LinearCost()
    random = Random(1)
    for number in range(400):
        cost.add(1, 5, 10.0 if number % 50 == 10 else 0.01 * random.uniform(0.9, 1.1))
    assert cost.predict(1, 5) == pytest.approx(0.01, rel=0.15)


@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.integers(1, 512), st.floats(1e-6, 10.0)), min_size=1, max_size=60
    ),
    st.integers(1, 64),
    st.integers(1, 512),
)
def test_predictions_are_positive_and_increase_with_counts(
    measured: list[tuple[int, int, float]], a: int, b: int
) -> None:
    cost = LinearCost()
    for one, other, seconds in measured:
        cost.add(one, other, seconds)
    assert 0.0 <= cost.predict(a, b) <= cost.predict(a + 1, b) <= cost.predict(a + 1, b + 1)


def round_of(load: int, proposed: int, slow: float = 1.0) -> RoundCost:
    """A round on a machine whose steps take 10 ms and 0.1 ms for each token."""
    verify = slow * (0.01 + 0.0001 * load * (proposed + 1))
    draft = slow * 0.002 * proposed
    seconds = verify + draft + slow * (0.001 if proposed else 0.0005)
    return RoundCost(proposed, seconds, verify, load, load * (proposed + 1), draft, load)


def taught(model: CostModel, slow: float, *lengths: int, rounds: int = 40) -> None:
    for _ in range(rounds):
        for load in (1, 8):
            for proposed in lengths:
                for _ in range(load):
                    result = round_of(load, proposed, slow=slow)
                    model.add(load, result, result.is_uniform)


def test_rounds_are_predicted_for_unmeasured_loads_and_lengths() -> None:
    model = CostModel()
    taught(model, 1.0, 0, 4)
    for load, proposed in ((1, 2), (4, 0), (4, 4), (16, 3)):
        assert model.seconds(load, proposed) == pytest.approx(round_of(load, proposed).seconds, rel=0.1)


def test_a_general_slowdown_applies_to_unmeasured_loads_too() -> None:
    """The load is one, so that rounds are not shared."""
    model = CostModel()
    taught(model, 1.0, 0, 4)
    taught(model, 2.0, 4, rounds=60)
    assert model.seconds(1, 0) == pytest.approx(round_of(1, 0, slow=2.0).seconds, rel=0.35)


def test_a_step_shared_with_prompts_does_not_count_as_a_round() -> None:
    alone = RoundCost(0, 0.5, 0.4, 4, 300)
    assert not alone.is_uniform
    assert round_of(4, 3).is_uniform
    model = CostModel()
    taught(model, 1.0, 0, 4)
    before = model.rest_seconds(4, 0)
    model.add(4, alone, alone.is_uniform)
    assert model.rest_seconds(4, 0) == pytest.approx(before, rel=0.05)


def test_another_target_starts_with_known_costs_and_learns_its_own() -> None:
    model = CostModel()
    taught(model, 1.0, 0, 4)
    other = model.copy()
    assert other.seconds(1, 4) == pytest.approx(model.seconds(1, 4), rel=0.2)
    taught(other, 3.0, 0, 4)
    assert other.seconds(1, 4) > 2.0 * model.seconds(1, 4)


def test_rates_are_conditional_and_start_at_the_previous_positions_rate() -> None:
    gains = AcceptanceModel()
    assert gains.rates(2) == [FIRST_RATE, FIRST_RATE]
    for _ in range(200):
        gains.add(3, 3)
        gains.add(3, 1)
    first, second, third, fourth = gains.rates(4)
    assert first == pytest.approx(1.0, abs=0.01)
    assert second == pytest.approx(0.5, abs=0.02)
    assert third == pytest.approx(1.0, abs=0.03)
    assert fourth == third, "nothing was seen there"


def test_expected_tokens_are_the_sum_of_products_of_rates() -> None:
    assert expected_tokens([0.5, 0.5]) == [1.0, 1.5, 1.75]
    assert expected_tokens([]) == [1.0]
    assert expected_tokens([0.8], 0.5) == [1.0, 1.4]


def test_a_requests_own_acceptance_is_separate_from_the_common_one() -> None:
    poor, usual = RequestAcceptance(), RequestAcceptance()
    for _ in range(40):
        poor.add(2, 0, [0.0, 0.8, 1.6])
        usual.add(2, 2, [0.0, 1.0, 2.0])
    assert poor.scale < 0.6
    assert usual.scale == pytest.approx(1.0)
    for _ in range(8):
        poor.forget()
    assert poor.scale == pytest.approx(1.0, abs=0.02)
