"""Counts, on the replica that had a part in a round, what became of its proposal."""

from __future__ import annotations

from coordinator.completion import Completion
from coordinator.figures import record_round
from tandem.types import SpeculationFigures


class RoundAccount:
    """The last round of a request, until it is known how it ended."""

    def __init__(self) -> None:
        self._open: tuple[Completion, SpeculationFigures, int, int, int] | None = None

    def begin(self, completion: Completion, figures: SpeculationFigures, drafted: int) -> None:
        """A round begins, with a proposal of so many tokens, to be counted in these figures."""
        so_far = completion.figures
        self._open = (completion, figures, drafted, so_far.rounds, so_far.accepted)

    def settle(self) -> int | None:
        """Count the round. How many tokens were accepted; None when there is no round, or it came to nothing."""
        if self._open is None:
            return None
        (completion, figures, drafted, rounds, before), self._open = self._open, None
        if completion.figures.rounds == rounds:
            return None
        accepted = completion.figures.accepted - before
        record_round(figures, drafted, accepted)
        return accepted
