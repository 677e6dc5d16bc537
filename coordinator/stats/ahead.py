"""Statistics of drafting ahead: how often the outcome of a verification had been drafted for, and what that saved."""

from __future__ import annotations

from itertools import zip_longest

from coordinator.stats.rounds import RoundResult
from tandem.types import AheadStats

MAX_RANKS = 16
"""Places among the outcomes with a count of their own."""


def record_outcome(stats: AheadStats, result: RoundResult) -> None:
    """Count a round, if its proposal was to be drafted ahead."""
    if not result.awaited_outcome:
        return
    stats.awaited += 1
    rank = result.outcome_rank
    if rank is None:
        return
    stats.hits += 1
    stats.saved_seconds += result.saved_seconds
    if rank < MAX_RANKS:
        stats.hits_by_rank += [0] * (rank + 1 - len(stats.hits_by_rank))
        stats.hits_by_rank[rank] += 1


def add_outcomes(total: AheadStats, stats: AheadStats) -> None:
    """Count in `total` everything that `stats` counted."""
    total.awaited += stats.awaited
    total.hits += stats.hits
    total.saved_seconds += stats.saved_seconds
    ranks = zip_longest(total.hits_by_rank, stats.hits_by_rank, fillvalue=0)
    total.hits_by_rank = [before + more for before, more in ranks]


def outcomes_since(stats: AheadStats, earlier: AheadStats) -> AheadStats:
    """Counts added since `earlier`."""
    ranks = zip_longest(stats.hits_by_rank, earlier.hits_by_rank, fillvalue=0)
    return AheadStats(
        stats.awaited - earlier.awaited,
        stats.hits - earlier.hits,
        [now - before for now, before in ranks],
        max(stats.saved_seconds - earlier.saved_seconds, 0.0),  # sums of floats differ in the last bit
    )


def hit_rate(stats: AheadStats) -> float:
    """Share of the rounds that awaited their proposal and found it there; 0 when none did."""
    return stats.hits / stats.awaited if stats.awaited else 0.0


def describe_ahead(stats: AheadStats) -> dict[str, object]:
    """All statistics by name, of types that JSON has."""
    return {
        "awaited": stats.awaited,
        "hits": stats.hits,
        "hit_rate": round(hit_rate(stats), 6),
        "hits_by_rank": list(stats.hits_by_rank),
        "saved_seconds": round(stats.saved_seconds, 6),
    }
