"""Speculation statistics: counts, the rates of MAX and vLLM, and the log line."""

from __future__ import annotations

import json

import pytest

from coordinator.stats.speculation import (
    CumulativeStats,
    acceptance_length,
    acceptance_rate,
    add,
    conditional_rates,
    cumulative_rates,
    describe,
    log_line,
    proposals,
    tokens_per_pass,
)
from coordinator.stats.tally import RoundTally
from tandem.types import PositionStats, SpeculationStats
from tests.unit.coordinator.round_results import round_result


def _stats(*rounds: tuple[int, int, int]) -> SpeculationStats:
    """Record rounds given as (number of rounds, tokens drafted, tokens accepted)."""
    tally = RoundTally()
    for count, drafted, accepted in rounds:
        for _ in range(count):
            tally.add(drafted, accepted)
    return tally.stats()


# 100 verifications, 20 of which had no proposal.
EXAMPLE = _stats((69, 2, 2), (7, 2, 1), (4, 2, 0), (20, 0, 0))


def test_the_log_line_is_that_of_max() -> None:
    assert log_line(EXAMPLE) == (
        "Draft Tokens: 145/160 (90.62%) accepted, Acceptance Len: 1.45 / 2 toks, Per-Pos: [95%, 86%] |"
    )


def test_the_log_line_without_rounds() -> None:
    assert log_line(SpeculationStats()) == ""
    assert log_line(_stats((3, 0, 0))) == ""


def test_rounds_and_tokens_are_counted() -> None:
    assert (EXAMPLE.rounds, EXAMPLE.drafted, EXAMPLE.accepted) == (100, 160, 145)
    assert proposals(EXAMPLE) == 80
    assert EXAMPLE.positions == [PositionStats(80, 80, 76), PositionStats(80, 76, 69)]


def test_acceptance_length_of_max_and_vllm() -> None:
    assert acceptance_length(EXAMPLE) == 1.45
    assert tokens_per_pass(EXAMPLE) == 2.45


def test_rates_per_position_of_max_and_vllm() -> None:
    assert cumulative_rates(EXAMPLE) == [0.95, 69 / 80]
    assert conditional_rates(EXAMPLE) == [0.95, 69 / 76]
    assert acceptance_rate(EXAMPLE) == 145 / 160


def test_positions_count_only_where_they_were_proposed() -> None:
    """The proposals have different lengths."""
    stats = _stats((1, 3, 3), (1, 1, 1), (1, 2, 0), (1, 3, 1))
    assert stats.positions == [PositionStats(4, 4, 3), PositionStats(3, 2, 1), PositionStats(2, 1, 1)]
    assert cumulative_rates(stats) == [3 / 4, 1 / 3, 1 / 2]
    assert conditional_rates(stats) == [3 / 4, 1 / 2, 1.0]


def test_a_position_that_was_never_reached_has_rate_zero() -> None:
    stats = _stats((5, 3, 0))
    assert conditional_rates(stats) == [0.0, 0.0, 0.0]
    assert stats.positions[1] == PositionStats(5, 0, 0)


def test_rates_without_rounds_are_zero() -> None:
    nothing = SpeculationStats()
    assert acceptance_rate(nothing) == acceptance_length(nothing) == 0.0
    assert tokens_per_pass(nothing) == 1.0
    assert cumulative_rates(nothing) == conditional_rates(nothing) == []
    assert proposals(nothing) == 0


def test_add_sums_all_counts() -> None:
    total = _stats((2, 1, 1))
    add(total, _stats((3, 4, 2)))
    assert total == _stats((2, 1, 1), (3, 4, 2))
    shorter = _stats((3, 4, 2))
    add(shorter, _stats((2, 1, 1)))
    assert shorter == total


def test_add_does_not_change_its_argument() -> None:
    one, total = _stats((1, 2, 1)), SpeculationStats()
    add(total, one)
    add(total, _stats((1, 2, 2)))
    assert one == _stats((1, 2, 1))


def test_cumulative_stats_by_rule() -> None:
    cumulative = CumulativeStats()
    for rule, drafted, accepted in (
        ("residual", 2, 1),
        ("residual", 2, 1),
        ("greedy", 3, 3),
        ("residual", 2, 2),
    ):
        cumulative.record(rule, round_result(drafted, accepted))
    total, by_rule = cumulative.snapshot()
    assert by_rule == {"residual": _stats((2, 2, 1), (1, 2, 2)), "greedy": _stats((1, 3, 3))}
    assert total == _stats((2, 2, 1), (1, 3, 3), (1, 2, 2))
    cumulative.record("greedy", round_result(3, 0))
    assert by_rule["greedy"] == _stats((1, 3, 3)), "a snapshot stays as it was"


@pytest.mark.parametrize("stats", [EXAMPLE, SpeculationStats()])
def test_the_description_contains_every_statistic(stats: SpeculationStats) -> None:
    described = json.loads(json.dumps(describe(stats)))
    assert described["acceptance_length"] == pytest.approx(acceptance_length(stats), abs=1e-6)
    assert described["tokens_per_pass"] == pytest.approx(tokens_per_pass(stats), abs=1e-6)
    assert described["per_position"]["conditional"] == pytest.approx(conditional_rates(stats), abs=1e-6)
    assert described["per_position"]["cumulative"] == pytest.approx(cumulative_rates(stats), abs=1e-6)
    assert described["acceptance_rate"] == pytest.approx(acceptance_rate(stats), abs=1e-6)
    counts = [described[name] for name in ("rounds", "proposals", "drafted", "accepted")]
    assert counts == [stats.rounds, proposals(stats), stats.drafted, stats.accepted]
