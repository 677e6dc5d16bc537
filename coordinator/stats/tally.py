"""Counts rounds with one dictionary access each. Statistics are derived when somebody reads them."""

from __future__ import annotations

from coordinator.stats.ahead import record_outcome
from coordinator.stats.rounds import RoundResult
from tandem.types import AheadStats, PositionStats, SpeculationStats


class RoundTally:
    """How many rounds had so many tokens proposed and so many of them accepted."""

    __slots__ = ("_rounds", "ahead")

    def __init__(self) -> None:
        self._rounds: dict[tuple[int, int], int] = {}
        self.ahead = AheadStats()

    def add(self, drafted: int, accepted: int) -> None:
        """Count one verification, with or without a proposal.

        Args:
            drafted: Tokens of the proposal.
            accepted: How many of them were kept, from the first on.
        """
        key = drafted, accepted
        self._rounds[key] = self._rounds.get(key, 0) + 1

    def add_result(self, result: RoundResult) -> None:
        """Count one round, drafting ahead included."""
        key = result.proposed, result.accepted
        self._rounds[key] = self._rounds.get(key, 0) + 1
        if result.awaited_outcome:
            record_outcome(self.ahead, result)

    def stats(self) -> SpeculationStats:
        """The counts as statistics. Their `ahead` is the tally's own."""
        stats = SpeculationStats(ahead=self.ahead)
        longest = max((drafted for drafted, _ in self._rounds), default=0)
        stats.positions = [PositionStats() for _ in range(longest)]
        for (drafted, accepted), rounds in self._rounds.items():
            stats.rounds += rounds
            stats.drafted += rounds * drafted
            stats.accepted += rounds * accepted
            for index, position in enumerate(stats.positions[:drafted]):
                position.drafted += rounds
                position.reached += rounds * (index <= accepted)
                position.accepted += rounds * (index < accepted)
        return stats
