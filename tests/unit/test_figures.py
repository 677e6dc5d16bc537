"""Figures of speculation: counts, what MAX and vLLM make of them, and the log line."""

from __future__ import annotations

import json

import pytest

from coordinator.figures import (
    CumulativeFigures,
    acceptance_rate,
    accepted_per_verification,
    add,
    conditional_rates,
    cumulative_rates,
    describe,
    log_line,
    mean_acceptance_length,
    proposals,
    record_round,
)
from tandem.types import PositionFigures, SpeculationFigures


def _figures(*rounds: tuple[int, int, int]) -> SpeculationFigures:
    """Rounds as (how many of them, tokens drafted, tokens accepted)."""
    figures = SpeculationFigures()
    for count, drafted, accepted in rounds:
        for _ in range(count):
            record_round(figures, drafted=drafted, accepted=accepted)
    return figures


# 100 verifications, 20 of which had no proposal.
EXAMPLE = _figures((69, 2, 2), (7, 2, 1), (4, 2, 0), (20, 0, 0))


def test_log_line_of_max() -> None:
    assert log_line(EXAMPLE) == (
        "Draft Tokens: 145/160 (90.62%) accepted, Acceptance Len: 1.45 / 2 toks, Per-Pos: [95%, 86%] |"
    )


def test_log_line_of_nothing() -> None:
    assert log_line(SpeculationFigures()) == ""
    assert log_line(_figures((3, 0, 0))) == ""


def test_counts() -> None:
    assert (EXAMPLE.rounds, EXAMPLE.drafted, EXAMPLE.accepted) == (100, 160, 145)
    assert proposals(EXAMPLE) == 80
    assert EXAMPLE.positions == [PositionFigures(80, 80, 76), PositionFigures(80, 76, 69)]


def test_acceptance_length_both_ways() -> None:
    assert accepted_per_verification(EXAMPLE) == 1.45
    assert mean_acceptance_length(EXAMPLE) == 2.45


def test_rates_per_position_both_ways() -> None:
    assert cumulative_rates(EXAMPLE) == [0.95, 69 / 80]
    assert conditional_rates(EXAMPLE) == [0.95, 69 / 76]
    assert acceptance_rate(EXAMPLE) == 145 / 160


def test_a_ragged_batch() -> None:
    """Proposals of different lengths: a position counts where it was proposed."""
    figures = _figures((1, 3, 3), (1, 1, 1), (1, 2, 0), (1, 3, 1))
    assert figures.positions == [PositionFigures(4, 4, 3), PositionFigures(3, 2, 1), PositionFigures(2, 1, 1)]
    assert cumulative_rates(figures) == [3 / 4, 1 / 3, 1 / 2]
    assert conditional_rates(figures) == [3 / 4, 1 / 2, 1.0]


def test_a_position_that_was_never_reached_has_rate_zero() -> None:
    figures = _figures((5, 3, 0))
    assert conditional_rates(figures) == [0.0, 0.0, 0.0]
    assert figures.positions[1] == PositionFigures(5, 0, 0)


def test_nothing_is_divided_by_zero() -> None:
    nothing = SpeculationFigures()
    assert acceptance_rate(nothing) == accepted_per_verification(nothing) == 0.0
    assert mean_acceptance_length(nothing) == 1.0
    assert cumulative_rates(nothing) == conditional_rates(nothing) == []
    assert proposals(nothing) == 0


def test_adding_is_counting_together() -> None:
    total = _figures((2, 1, 1))
    add(total, _figures((3, 4, 2)))
    assert total == _figures((2, 1, 1), (3, 4, 2))
    shorter = _figures((3, 4, 2))
    add(shorter, _figures((2, 1, 1)))
    assert shorter == total


def test_adding_leaves_what_is_added_alone() -> None:
    one, total = _figures((1, 2, 1)), SpeculationFigures()
    add(total, one)
    record_round(total, drafted=2, accepted=2)
    assert one == _figures((1, 2, 1))


def test_cumulative_figures_by_rule() -> None:
    cumulative = CumulativeFigures()
    cumulative.add("residual", _figures((2, 2, 1)))
    cumulative.add("greedy", _figures((1, 3, 3)))
    cumulative.add("residual", _figures((1, 2, 2)))
    assert cumulative.by_rule == {"residual": _figures((2, 2, 1), (1, 2, 2)), "greedy": _figures((1, 3, 3))}
    assert cumulative.total == _figures((2, 2, 1), (1, 3, 3), (1, 2, 2))


@pytest.mark.parametrize("figures", [EXAMPLE, SpeculationFigures()])
def test_description_names_every_figure(figures: SpeculationFigures) -> None:
    told = json.loads(json.dumps(describe(figures)))
    assert told["acceptance_length"] == pytest.approx(accepted_per_verification(figures), abs=1e-6)
    assert told["mean_acceptance_length"] == pytest.approx(mean_acceptance_length(figures), abs=1e-6)
    assert told["per_position"]["conditional"] == pytest.approx(conditional_rates(figures), abs=1e-6)
    assert told["per_position"]["cumulative"] == pytest.approx(cumulative_rates(figures), abs=1e-6)
    assert told["acceptance_rate"] == pytest.approx(acceptance_rate(figures), abs=1e-6)
    counts = [told[name] for name in ("rounds", "proposals", "drafted", "accepted")]
    assert counts == [figures.rounds, proposals(figures), figures.drafted, figures.accepted]
