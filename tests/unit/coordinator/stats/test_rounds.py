"""Statistics of drafting ahead: hits by rank of the outcome, and the time that they saved."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.stats.rounds import MAX_RANKS, RoundTally
from coordinator.stats.speculation import add, log_line, since
from tandem.types import AheadStats, PositionStats, SpeculationStats
from tests.unit.coordinator.round_results import round_result


def stats_of(*ranks: int | None, saved: float = 0.25) -> SpeculationStats:
    """Record one round for each rank; None is a miss."""
    tally = RoundTally()
    for rank in ranks:
        hit_seconds = 0.0 if rank is None else saved
        tally.add_result(round_result(4, 2, awaited=True, rank=rank, saved=hit_seconds))
    return tally.stats()


def test_hits_are_counted_by_rank() -> None:
    assert stats_of(0, 2, None, 0).ahead == AheadStats(4, 3, [2, 0, 1], 0.75)


def test_ranks_are_bounded_and_hits_are_not() -> None:
    ahead = stats_of(MAX_RANKS - 1, MAX_RANKS, 63).ahead
    assert ahead.hits == 3
    assert ahead.hits_by_rank == [0] * (MAX_RANKS - 1) + [1]


@pytest.mark.parametrize(("first", "second"), [((0, 3), (None, 1)), ((1,), (0, 5, None)), ((), (2,))])
def test_add_sums_and_since_subtracts(first: tuple[int | None, ...], second: tuple[int | None, ...]) -> None:
    total, whole = stats_of(*first), stats_of(*first, *second)
    fresh = since(whole, total)
    kept = replace(fresh.ahead)
    add(total, fresh)
    assert total == whole
    assert fresh.ahead == kept, "what is added stays as it was"


def test_saved_time_never_decreases() -> None:
    """Counters of metrics refuse a negative step, and sums of floats differ in their last bit."""
    counted, stats = SpeculationStats(), SpeculationStats()
    for _ in range(500):
        add(stats, stats_of(0, saved=0.1))
        fresh = since(stats, counted)
        assert fresh.ahead.saved_seconds >= 0.0
        add(counted, fresh)
        assert since(stats, counted).ahead.saved_seconds >= 0.0


def test_the_log_line_reports_the_saved_time() -> None:
    assert log_line(stats_of(0, None)).endswith("| Drafted Ahead: 1/2 (50.00%) hits, 0.25 s saved |")
    assert "Ahead" not in log_line(stats_of())


rounds = st.integers(0, 6).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted)))


@given(st.lists(rounds, max_size=40))
def test_statistics_are_those_of_counting_each_position(made: list[tuple[int, int]]) -> None:
    tally = RoundTally()
    for drafted, accepted in made:
        tally.add(drafted, accepted)
    stats = tally.stats()
    assert stats.rounds == len(made)
    assert stats.drafted == sum(drafted for drafted, _ in made)
    assert stats.accepted == sum(accepted for _, accepted in made)
    longest = max((drafted for drafted, _ in made), default=0)
    assert stats.positions == [
        PositionStats(
            drafted=sum(drafted > index for drafted, _ in made),
            reached=sum(drafted > index <= accepted for drafted, accepted in made),
            accepted=sum(accepted > index for _, accepted in made),
        )
        for index in range(longest)
    ]
