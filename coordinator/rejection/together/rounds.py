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
    """The rounds that one message answers. They are decided when the first acceptance is asked for."""

    def __init__(self) -> None:
        self._rounds: dict[AcceptMany, list[Round]] = {}
        self._decided: dict[AcceptMany, list[Acceptance | None]] = {}

    def add(self, accept_many: AcceptMany, own: Round) -> Callable[[], Acceptance | None]:
        """Take a round.

        Args:
            accept_many: Of its rule.
            own: The round.

        Returns:
            What returns its acceptance; None if the rule must decide on it alone.
        """
        rounds = self._rounds.setdefault(accept_many, [])
        index = len(rounds)
        rounds.append(own)
        return lambda: self._acceptance(accept_many, index)

    def _acceptance(self, accept_many: AcceptMany, index: int) -> Acceptance | None:
        decided = self._decided.get(accept_many)
        if decided is None:
            rounds = self._rounds[accept_many]
            decided = accept_many(rounds) if len(rounds) >= _MIN_ROUNDS else []
            self._decided[accept_many] = decided
        return decided[index] if index < len(decided) else None
