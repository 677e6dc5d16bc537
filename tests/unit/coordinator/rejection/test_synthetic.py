"""Synthetic acceptance: the schedules give the requested rates."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from coordinator.rejection import Round, RowError, resolve
from coordinator.rejection.rules import schedule_of_length, schedule_of_rate, schedule_of_rates
from tandem.config import SpeculativeConfig
from tandem.types import Acceptance, NextToken
from tests.unit.coordinator.rejection.builders import (
    GREEDY,
    SAMPLED,
    bonus_row,
    proposal,
    statistics,
    support_row,
    synthetic,
    token_rows,
    uniforms,
    verification,
)


def _joint(schedule: tuple[float, ...]) -> list[float]:
    """The probability that the token at each position is accepted."""
    return list(itertools.accumulate(schedule, lambda reached, rate: reached * rate))


@pytest.mark.parametrize("token_count", [1, 2, 5, 16])
@pytest.mark.parametrize("rate", [0.0, 0.01, 0.3, 0.5, 0.9, 1.0])
def test_rate_is_the_mean_over_positions(rate: float, token_count: int) -> None:
    schedule = schedule_of_rate(rate, token_count)
    assert len(set(schedule)) == 1
    assert len(schedule) == token_count
    assert sum(_joint(schedule)) / token_count == pytest.approx(rate, abs=1e-12)


def test_rate_by_hand() -> None:
    """b + b**2 = 2 * 0.375 has the solution 1/2."""
    assert schedule_of_rate(0.375, 2) == pytest.approx((0.5, 0.5), abs=1e-15)


@pytest.mark.parametrize("rates", [(0.9, 0.6, 0.3), (1.0, 1.0), (0.5, 0.0, 0.0), (0.0, 0.0), (0.7,)])
def test_rates_are_unconditional(rates: tuple[float, ...]) -> None:
    assert _joint(schedule_of_rates(rates)) == pytest.approx(rates)


@pytest.mark.parametrize("token_count", [1, 3, 5])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.75, 1.0])
def test_length_counts_the_token_after_the_run(token_count: int, share: float) -> None:
    length = 1 + share * token_count
    joint = _joint(schedule_of_length(length, token_count))
    assert 1 + sum(joint) == pytest.approx(length)
    # Minimum variance: each round has one of the two integer lengths next to the mean.
    assert sum(0 < value < 1 for value in joint) <= 1


def test_length_by_hand() -> None:
    assert schedule_of_length(3.25, 4) == (1.0, 1.0, 0.25, 0.0)


SCHEDULE = (0.8, 0.5, 0.2)
ROWS = [support_row({}, 0, statistics(argmax=token)) for token in (11, 12, 13, 14)]


@pytest.mark.parametrize(
    ("accepted_at", "expected"),
    [
        ((0.79, 0.49, 0.19), Acceptance(3, 14, NextToken.BONUS)),
        ((0.8, 0.1, 0.1), Acceptance(0, 11, NextToken.RECOVERED)),
        ((0.1, 0.5, 0.1), Acceptance(1, 12, NextToken.RECOVERED)),
        ((0.1, 0.1, 0.2), Acceptance(2, 13, NextToken.RECOVERED)),
    ],
)
def test_acceptance(accepted_at: tuple[float, ...], expected: Acceptance) -> None:
    drawn = uniforms(*accepted_at)
    given = proposal(1, 2, 3)
    assert synthetic(*SCHEDULE)(given, verification(*ROWS), SAMPLED, drawn) == expected
    assert synthetic(*SCHEDULE)(given, token_rows(11, 12, 13, 14), GREEDY, drawn) == expected


def test_the_models_tokens_do_not_matter() -> None:
    surely = (1.0, 1.0)
    rows = verification(*[support_row({1: 0.0}, 8, statistics(argmax=8))] * 2, ROWS[0])
    accepted = synthetic(*surely)(proposal(1, 1), rows, SAMPLED, uniforms(0.999, 0.999))
    assert accepted == Acceptance(2, 11, NextToken.BONUS)


def test_a_shorter_proposal_uses_the_first_rates_and_a_longer_one_ends_with_them() -> None:
    assert synthetic(*SCHEDULE)(proposal(1), token_rows(1, 9), GREEDY, uniforms(0.79)).accepted_count == 1
    longer = synthetic(*(0.5,))(proposal(1, 2), token_rows(1, 2, 9), GREEDY, uniforms(0.1, 0.1))
    assert longer == Acceptance(1, 2, NextToken.RECOVERED)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            SpeculativeConfig(
                rejection_sampling_strategy="synthetic",
                num_speculative_tokens=3,
                synthetic_acceptance_rate=0.25,
            ),
            0.75,
        ),
        (
            SpeculativeConfig(
                rejection_sampling_strategy="synthetic",
                num_speculative_tokens=3,
                synthetic_acceptance_rates=(0.5, 0.25, 0.2),
            ),
            0.95,
        ),
        (
            SpeculativeConfig(
                rejection_sampling_strategy="synthetic",
                num_speculative_tokens=3,
                synthetic_acceptance_length=2.5,
            ),
            1.5,
        ),
    ],
)
def test_options_give_the_requested_mean(options: SpeculativeConfig, expected: float) -> None:
    """10000 rounds of fixed noise; the standard error of the mean is at most 0.0125, and 5 of them are allowed."""
    rule = resolve(options, GREEDY)
    rng = np.random.default_rng(0)
    rows, given = token_rows(1, 2, 3, 9), proposal(1, 2, 3)
    accepted = [
        rule.accept(Round(given, rows, GREEDY), uniforms(*rng.random(3))).accepted_count
        for _ in range(10_000)
    ]
    assert np.mean(accepted) == pytest.approx(expected, abs=5 * float(np.std(accepted)) / 100)


def test_rows_without_statistics_are_refused() -> None:
    with pytest.raises(RowError, match="statistics"):
        synthetic(*SCHEDULE)(proposal(), verification(bonus_row(1)), SAMPLED, uniforms())
