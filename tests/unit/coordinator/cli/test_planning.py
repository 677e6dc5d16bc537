"""The table of the plan agrees with the controller's formula."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.cli.planning import StepTimes, break_even, measured_times, plan
from tandem.speculation_state import SpeculationDecision

FIGURES = StepTimes(0.0065, 0.0012, (0.8,), per_8_rows=0.0)


def test_without_messages_the_speedup_is_the_usual_formula() -> None:
    """(1 + E[accepted]) / (cost_draft x K + cost_verify), in units of a verification."""
    for row in plan(FIGURES, 1).rows:
        expected = sum(0.8**i for i in range(row.tokens + 1)) / (row.tokens * 1.2 / 6.5 + 1.0)
        assert row.speedup == pytest.approx(expected)
        assert row.speedup_without_wire == pytest.approx(expected)


def test_the_best_length_is_the_one_with_the_highest_speedup() -> None:
    found = plan(replace(FIGURES, round_trip_seconds=0.0005), 1)
    assert found.best_speedup == max(row.speedup for row in found.rows)
    assert found.rows[found.best_tokens].speedup == found.best_speedup
    assert found.rows[found.best_tokens].speedup < found.rows[found.best_tokens].speedup_without_wire


def test_at_the_break_even_acceptance_drafting_begins_to_pay() -> None:
    rate = break_even(FIGURES, 1, 8)
    assert rate is not None
    assert plan(replace(FIGURES, acceptance_rates=(rate - 0.01,)), 1, 8).best_tokens == 0
    assert plan(replace(FIGURES, acceptance_rates=(rate + 0.01,)), 1, 8).best_tokens > 0
    assert break_even(replace(FIGURES, draft_step_seconds=1.0), 1, 8) is None


def test_every_remedy_helps_and_the_most_helpful_comes_first() -> None:
    found = plan(replace(FIGURES, round_trip_seconds=0.004), 1, 8)
    gains = [gain for _, gain in found.remedies]
    assert gains == sorted(gains, reverse=True)
    assert all(gain >= found.best_speedup for name, gain in found.remedies if "ahead" not in name)


def test_a_clusters_plan_uses_its_predicted_rounds() -> None:
    decision = SpeculationDecision(
        "t",
        "d",
        "residual",
        "0.85-1.15",
        4,
        2,
        2,
        1.2,
        0.0,
        0.0,
        (0.010, 0.013, 0.015),
        (0.8, 0.6),
        0.001,
        0.002,
    )
    found = plan(measured_times(decision), 4, 2)
    assert [row.round_seconds for row in found.rows] == pytest.approx([0.010, 0.013, 0.015])
    assert found.rows[2].speedup == pytest.approx((1 + 0.8 + 0.48) * 0.010 / 0.015)
