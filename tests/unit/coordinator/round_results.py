"""Results of rounds, for tests of their receivers."""

from __future__ import annotations

from coordinator.stats.rounds import RoundCost, RoundResult, RoundTimes


def round_result(
    proposed: int,
    accepted: int,
    cost: RoundCost | None = None,
    *,
    draft: str | None = None,
    target: str | None = None,
    awaited: bool = False,
    rank: int | None = None,
    saved: float = 0.0,
) -> RoundResult:
    """A round that committed one token more than it accepted."""
    times = RoundTimes(0.0, 0.0, 0.0, 0.0, 0.0)
    return RoundResult(
        proposed, accepted, accepted + 1, times, cost, proposed > 0, draft, target, awaited, rank, saved
    )
