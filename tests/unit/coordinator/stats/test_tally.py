"""A tally's statistics are those of counting round by round, position by position."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.stats.tally import RoundTally
from tandem.types import PositionStats

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


def test_reading_does_not_count() -> None:
    tally = RoundTally()
    tally.add(3, 1)
    assert tally.stats() == tally.stats()
