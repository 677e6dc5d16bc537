"""Rounds of several sequences that one message answers, decided by one call for each rule.

numpy takes microseconds to begin, whatever the number of rows: sixty-four rounds of `residual` at once take a tenth of
what they take one by one (docs/benchmarks.md). The tokens are the same: every random number has a key of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.types import Acceptance, Proposal, SamplingParams, Verification

_MIN_ROUNDS = 3
"""Fewer are decided one by one, which is then faster."""


@dataclass(slots=True, eq=False)  # one for each round: to freeze it would take three times as long
class Round:
    """One round that a rule decides on."""

    proposal: Proposal
    verification: Verification
    sampling: SamplingParams


AcceptMany = Callable[[Sequence[Round]], list[Acceptance | None]]
"""Decides rounds as the rule would one by one; None for a round that it leaves to the rule."""


class RoundsOfMessage:
    """The rounds that one message answers. Those of a rule are decided when the first acceptance is asked for; rounds
    that come later are decided with each other."""

    def __init__(self) -> None:
        self._open: dict[AcceptMany, _Batch] = {}

    def add(self, accept_many: AcceptMany, own: Round) -> Callable[[], Acceptance | None]:
        """Take a round.

        Args:
            accept_many: Of its rule.
            own: The round.

        Returns:
            What returns its acceptance; None if the rule must decide on it alone.
        """
        batch = self._open.get(accept_many)
        if batch is None or batch.decided is not None:
            batch = self._open[accept_many] = _Batch(accept_many)
        index = len(batch.rounds)
        batch.rounds.append(own)
        return lambda: batch.acceptance(index)


class _Batch:
    """Rounds that one call decides."""

    def __init__(self, accept_many: AcceptMany) -> None:
        self.rounds: list[Round] = []
        self.decided: list[Acceptance | None] | None = None
        """None until the first acceptance is asked for."""
        self._accept_many = accept_many

    def acceptance(self, index: int) -> Acceptance | None:
        """Of the round with that index; None if the rule must decide on it alone."""
        if self.decided is None:
            self.decided = self._accept_many(self.rounds) if len(self.rounds) >= _MIN_ROUNDS else []
        return self.decided[index] if self.decided else None
