"""The audit's statistics: exact expectations, faults that are found, right samplers that are not accused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

from tandem_audit.run import COLD, MAIN, NUCLEUS, TEMPERATURE, TOP_P, condition_steps
from tandem_audit.simulation.__main__ import bias_sampler, biases, false_alarms, judge, sampler, simulate
from tandem_audit.simulation.samplers import FAULTS, Language
from tandem_audit.statistics import (
    ALPHA,
    Calibration,
    Evidence,
    Steps,
    holm,
    join_steps,
    martingale_p,
    normal_p,
    permutation_p,
)

LANGUAGE = Language.random()
BIASES = cache(partial(biases, LANGUAGE))
TOKENS = {"recovery shares the draft's noise": 60_000}
"""Where fewer than 12,000 do not suffice."""


def made(generator: np.random.Generator, *, ties: bool = False) -> Steps:
    """A completion with random distributions, of which a part is not listed."""
    length = 30
    width = 5
    weights = generator.exponential(size=(length, width))
    if ties:
        weights = np.ceil(2 * weights)
    weights = -np.sort(-weights, axis=1)
    probs = weights / weights.sum(axis=1, keepdims=True) * 0.9
    ids = np.array([generator.permutation(9)[:width] for _ in range(length)])
    chosen = generator.integers(0, width + 1, length)
    tokens = np.where(chosen < width, ids[np.arange(length), np.minimum(chosen, width - 1)], 99)
    return Steps(
        ids.astype(np.int64),
        probs,
        chosen.astype(np.int64),
        tokens.astype(np.int64),
        np.arange(length),
        np.ones(length, bool),
    )


def with_last(steps: Steps, column: int) -> Steps:
    """The same completion with another last draw."""
    width = steps.ids.shape[1]
    chosen = steps.chosen.copy()
    tokens = steps.tokens.copy()
    chosen[-1] = column
    tokens[-1] = steps.ids[-1, column] if column < width else 99
    return replace(steps, chosen=chosen, tokens=tokens)


@pytest.mark.parametrize("ties", [False, True])
def test_every_test_is_a_martingale_and_every_bet_is_fair(ties: bool) -> None:
    generator = np.random.default_rng(3)
    learnt = [made(generator, ties=ties) for _ in range(3)]
    steps = made(generator, ties=ties)
    probs = np.append(steps.probs[-1], 1 - steps.probs[-1].sum())

    def after(column: int) -> tuple[np.ndarray, np.ndarray]:
        calibration = Calibration(modulus=3)
        for each in learnt:
            calibration.add(each)
        calibration.add(with_last(steps, column))
        return calibration.sums, np.exp(calibration.wealth)

    outcomes = [after(column) for column in range(len(probs))]
    drawn = np.array([sums[:, 0] - sums[:, 1] for sums, _ in outcomes])
    before = Calibration(modulus=3)
    for each in learnt:
        before.add(each)
    before.add(Steps(*(getattr(steps, name)[:-1] for name in Steps.__slots__)))
    total = before.sums[:, 0] - before.sums[:, 1]
    np.testing.assert_allclose(probs @ drawn, total, atol=1e-12)
    variance = probs @ (drawn - total) ** 2
    np.testing.assert_allclose(variance, outcomes[0][0][:, 2] - before.sums[:, 2], atol=1e-12)
    np.testing.assert_allclose(
        probs @ (drawn - total) ** 3, outcomes[0][0][:, 3] - before.sums[:, 3], atol=1e-12
    )
    wealth = np.array([values for _, values in outcomes])
    np.testing.assert_allclose(np.einsum("c,ctb->tb", probs, wealth), np.exp(before.wealth), rtol=1e-9)
    assert variance.max() > 0.05


def test_the_order_of_equal_candidates_changes_nothing() -> None:
    steps = made(np.random.default_rng(1), ties=True)
    order = np.argsort(-steps.probs + 1e-6 * np.random.default_rng(2).random(steps.probs.shape), axis=1)
    back = np.append(np.argsort(order, axis=1), np.full((len(steps), 1), 5), axis=1)
    moved = replace(
        steps,
        ids=np.take_along_axis(steps.ids, order, 1),
        probs=np.take_along_axis(steps.probs, order, 1),
        chosen=back[np.arange(len(steps)), steps.chosen],
    )
    assert not np.array_equal(moved.ids, steps.ids)
    one = Calibration()
    other = Calibration()
    for _ in range(2):
        one.add(steps)
        other.add(moved)
    np.testing.assert_allclose(one.sums, other.sums)


def test_a_completion_does_not_reach_into_the_next() -> None:
    generator = np.random.default_rng(4)
    parts = [made(generator), made(generator)]
    together = Calibration(modulus=2)
    apart = Calibration(modulus=2)
    together.add(join_steps(parts))
    names = [i for i, (_, base) in enumerate(together.names) if "bias" not in base and "usual" not in base]
    for each in parts:
        apart.add(each)
    np.testing.assert_allclose(together.sums[names], apart.sums[names])


def test_positions_that_are_not_usable_count_nothing() -> None:
    calibration = Calibration()
    calibration.add(replace(made(np.random.default_rng(5)), is_usable=np.zeros(30, bool)))
    assert calibration.tokens == 0
    assert not calibration.sums.any()
    assert not calibration.wealth.any()


def test_a_restricted_draw_is_exact_without_the_normaliser() -> None:
    steps = made(np.random.default_rng(6))
    cold, _ = condition_steps(COLD, steps, is_raw=True)
    weights = steps.probs ** (1 / TEMPERATURE)
    np.testing.assert_allclose(cold.probs, weights / weights.sum(axis=1, keepdims=True))
    np.testing.assert_array_equal(cold.is_usable, steps.chosen < 5)
    kept, _ = condition_steps(NUCLEUS, steps, is_raw=True)
    np.testing.assert_allclose(kept.probs.sum(axis=1), 1.0)
    assert ((kept.probs > 0).sum(axis=1) < 5).any()
    assert condition_steps(MAIN, steps, is_raw=True) == (steps, 0)


def test_a_token_that_top_p_removes_is_counted() -> None:
    probs = np.array([[0.5, 0.29, 0.005, 0.005]] * 3 + [[0.5, 0.2, 0.05, 0.05]])
    steps = Steps(
        np.tile(np.arange(4), (4, 1)),
        probs,
        np.array([1, 2, 4, 4]),
        np.array([1, 2, 9, 9]),
        np.arange(4),
        np.ones(4, bool),
    )
    # 0.5 + 0.29 is within the margin of 0.8, so nobody knows; after 0.85 it is.
    assert condition_steps(NUCLEUS, steps, is_raw=True)[1] == 0
    more = replace(steps, probs=np.where(probs == 0.29, 0.35, probs))
    assert condition_steps(NUCLEUS, more, is_raw=True)[1] == 2
    assert TOP_P == 0.8


def test_p_values_of_rare_events_accuse_less() -> None:
    z, p = martingale_p(18.0, 20.0, 20.0)
    assert p is not None
    assert p > normal_p(z)
    # The exact tail of a Poisson variable of mean 20 at 38 is 2.3e-4, both sides have no more than twice that.
    assert 2.3e-4 < p < 4e-3
    assert martingale_p(18.0, 20.0, 0.0)[1] == normal_p(z)
    assert martingale_p(18.0, 19.0, 0.0)[1] is None


def test_holm() -> None:
    assert holm([0.01, None, 0.04, 0.03]) == [
        pytest.approx(0.03),
        None,
        pytest.approx(0.06),
        pytest.approx(0.06),
    ]
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_permutation_p_is_exact_and_sees_a_difference() -> None:
    generator = np.random.default_rng(8)
    strata = np.repeat(np.arange(10), 20)
    units = np.arange(200)
    is_second = np.tile([True, False], 100)

    def p(shift: float, seed: int) -> float:
        draws = np.random.default_rng(seed).random(200) + np.where(is_second, shift, 0.0)
        return permutation_p(strata * 2 + (draws > 0.5), units, strata, is_second, 399)

    under_the_null = [p(0.0, seed) for seed in generator.integers(0, 1 << 30, 60)]
    assert 0.3 < float(np.mean(under_the_null)) < 0.7
    assert p(0.3, 1) < 0.01


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_found(fault: str) -> None:
    evidence, removed = simulate(LANGUAGE, sampler(LANGUAGE, fault), 2, TOKENS.get(fault, 12_000), fault)
    assert judge(evidence, removed) < ALPHA


@pytest.mark.parametrize("bias", ["the first choice too often", "the draft mixed in"])
def test_a_total_variation_of_0_0125_is_found_in_ten_minutes(bias: str) -> None:
    evidence, removed = simulate(LANGUAGE, bias_sampler(LANGUAGE, BIASES()[bias]), 1)
    assert judge(evidence, removed) < ALPHA


def test_right_samplers_are_not_accused() -> None:
    assert min(false_alarms(4, 6_000)) >= ALPHA


def test_the_e_process_needs_the_level_of_its_half_of_the_false_alarms() -> None:
    above = Evidence({MAIN: Calibration()}, [(10, 3.71), (20, -1.0)])
    below = Evidence({MAIN: Calibration()}, [(10, 3.69)])
    assert (ALPHA, above.is_finding, below.is_finding) == (0.0004, True, False)
