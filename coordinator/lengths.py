"""Which length of proposals makes the most tokens in a time, found by trying. No clock."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import cycle
from statistics import fmean

BEGINNING_ROUNDS = 32
"""Rounds of each request before the first comparison."""
TURNS = 2
"""A comparison takes turns: so often the other length, and so often the one kept. What comes and goes meanwhile, as
prompts that are read, then slows down both."""
TURN_ROUNDS = 2
"""Rounds of each request in one turn, at least."""
LEAST_TURN_ROUNDS = 12
"""Rounds of all requests together in one turn, at least."""
FEW = 4
"""Fewer requests stay with a length for as many times more rounds, since their turns take more."""
SETTLING_ROUNDS = 3
"""Rounds of each request before, which do not count: they share steps with the length before. With 16 requests and 200
million parameters a round of the target alone took 48 ms after one such round, 29 to 36 after three."""
FIRST_STAY_ROUNDS = 64
LONGEST_STAY_ROUNDS = 1024
"""Rounds of each request between two comparisons: twice as many after each that found nothing better."""
LEAST_ADVANTAGE = 1.05
"""Another length must make so many times the tokens: less may be noise."""
READING = 1.05
"""Times the tokens that rounds with a draft must make for it to be worth what they do not show: that it reads prompts,
too."""
CLEAR = 1.25
"""Times the tokens by which one length must be the better one for a comparison to take no more turns: what is so much
slower costs too. That a longer one is better than the one kept is never decided in a hurry."""

logger = logging.getLogger(__name__)


class Lengths:
    """Keeps to one length, and compares each of the others with it in turn, ever more rarely.

    Not its neighbours alone: drafting at all costs messages and a step of the draft, so a few tokens may be worse than
    many and worse than none.
    """

    def __init__(self, most: int, first: int) -> None:
        """
        Args:
            most: Tokens of the longest. The others are its half and so on, down to 0: the target works alone.
            first: Tokens to begin with.
        """
        self.kept = first
        """Tokens of the best length so far."""
        self._candidates = cycle((0, *(most >> i for i in range(most.bit_length()))))
        self._other = self._next_other()
        self._comparison: Comparison | None = None
        self._stay_rounds = BEGINNING_ROUNDS
        """Of each request, until the next comparison."""
        self._stayed = 0.0
        """How many of them have gone by."""

    @property
    def tokens(self) -> int:
        """How many tokens a proposal is to have now."""
        return self.kept if self._comparison is None else self._comparison.tokens

    def add(self, wanted: int | None, accepted: int, seconds: float | None, followers: int) -> None:
        """Count a round.

        Args:
            wanted: What `tokens` had said; None where it was not asked.
            accepted: Tokens of the proposal that the round committed.
            seconds: What all of the round took; None where that says nothing about the length.
            followers: How many requests count their rounds here.
        """
        if wanted is not None and wanted != self.tokens:
            return
        if self._comparison is not None:
            self._comparison.add(accepted, seconds, followers)
            if self._comparison.is_over:
                self._decide(self._comparison, followers)
            return
        self._stayed += 1.0 / max(followers, FEW)  # how many they are changes meanwhile
        if self._stayed >= self._stay_rounds:
            self._comparison = Comparison(self.kept, self._other)

    def interrupt(self) -> None:
        """Begin the comparison in progress anew, if there is one."""
        self._comparison = None

    def _decide(self, comparison: Comparison, followers: int) -> None:
        if comparison.advantage > LEAST_ADVANTAGE:
            left, self.kept = self.kept, self._other
            self._stay_rounds = 0
            self._other = self._next_other()
            if self._other == left:  # that comparison was just made
                self._other = self._next_other()
            advantage = round(comparison.advantage, 2)
            details = {"requests": followers, "tokens": self.kept, "advantage": advantage}
            logger.info("proposals change their length", extra=details)
        else:
            self._stay_rounds = min(max(2 * self._stay_rounds, FIRST_STAY_ROUNDS), LONGEST_STAY_ROUNDS)
            self._other = self._next_other()
        self._comparison = None
        self._stayed = 0.0

    def _next_other(self) -> int:
        return next(length for length in self._candidates if length != self.kept)


class Comparison:
    """Of the length that is kept with another one: rounds of either in turn."""

    def __init__(self, kept: int, other: int) -> None:
        """
        Args:
            kept: Tokens of the one.
            other: Tokens of the other; not as many.
        """
        self._kept, self._other = kept, other
        self._accepted: dict[int, list[int]] = {kept: [], other: []}
        self._seconds: dict[int, list[float]] = {kept: [], other: []}
        self._turns_left = 2 * TURNS
        self._rounds = 0

    @property
    def tokens(self) -> int:
        """Of the length whose turn it is."""
        return self._kept if self._turns_left % 2 else self._other

    def add(self, accepted: int, seconds: float | None, followers: int) -> None:
        """Count a round of that length. See `Lengths.add`."""
        self._rounds += 1
        settling = SETTLING_ROUNDS * followers
        if seconds is not None and self._rounds > settling:
            self._accepted[self.tokens].append(accepted)
            self._seconds[self.tokens].append(seconds)
        if self._rounds >= settling + max(TURN_ROUNDS * followers, LEAST_TURN_ROUNDS):
            self._turns_left -= 1
            self._rounds = 0

    @property
    def advantage(self) -> float:
        """Tokens in a time of the other length, over those of the one kept; 0 where either was not measured."""
        kept = self._rate(self._kept)
        return self._rate(self._other) / kept if kept > 0.0 else 0.0

    @property
    def is_over(self) -> bool:
        """Whether all turns were taken, or as many of either that leave no doubt."""
        is_fair = self._turns_left % 2 == 0 and self._rounds == 0
        return self._turns_left == 0 or (is_fair and self.is_clear)

    @property
    def is_clear(self) -> bool:
        """Whether one is so much better that more turns would be a waste."""
        advantage = self.advantage
        if advantage <= 0.0:
            return False
        return advantage < 1.0 / CLEAR or (advantage > CLEAR and self._other < self._kept)

    def _rate(self, length: int) -> float:
        """Tokens a second of one request. What of a longer proposal was accepted says what of its beginning would have
        been."""
        seconds = self._seconds[length]
        if not seconds:
            return 0.0
        counted: Sequence[int] = self._accepted[length]
        longer = max(self._accepted)
        if longer != length:
            counted = [*counted, *self._accepted[longer]]
        tokens = 1.0 + fmean(min(accepted, length) for accepted in counted)
        return tokens / max(_middle(seconds), 1e-9) / (READING if length else 1.0)


def _middle(times: Sequence[float]) -> float:
    """Mean of the middle half: a hiccup of the machine does not move it, and it varies less than a median."""
    quarter = len(times) // 4
    return fmean(sorted(times)[quarter : len(times) - quarter])
