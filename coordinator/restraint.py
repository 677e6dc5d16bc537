"""How long the proposals of all requests may be at the load that there is.

Where reading the weights takes the time, the tokens of a proposal are verified almost for nothing; where many sequences
share a step, or models are small, computing and messages take it, and every rejected token costs. One request cannot
find out, for what it measures with fewer is a step in which the others verify as many as before. So all of them change
their proposals for a moment, now and then (`coordinator.lengths`). Few begin with what they asked for. Many begin with
the target alone, which is never worse, and draft once that was found to be faster. vLLM's `disable_by_batch_size` drew
one such line by hand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from coordinator.lengths import FIRST_STAY_ROUNDS, Lengths

MANY = 12
"""Requests at once, from which on the target works alone until drafting was found to be faster."""
BURST = 4
"""Requests in their first round at once, beyond which one more does without a draft in that round: how many there will
be is not known yet, and a draft that is not asked in the end has read the prompt in vain."""
REMEMBERED_ROUNDS = 4
"""The load is the highest of the last so many rounds: where many have just ended, as many may begin. A lone request
after them does as they did for as long."""


class Restraint:
    """Follows the rounds of requests that would propose as many tokens, for each load on its own.

    One load are 12 to 23 requests, another twice as many: what people set, as 16, lies well inside, so that the first
    requests that end do not make another of it.
    """

    def __init__(self, num_speculative_tokens: int, load: Callable[[], int]) -> None:
        """
        Args:
            num_speculative_tokens: What each would propose.
            load: How many requests run.
        """
        self._most = num_speculative_tokens
        self._load = load
        self._loads: deque[int] = deque(maxlen=REMEMBERED_ROUNDS)
        self._levels: dict[int, Lengths] = {}
        self._seen_rounds: dict[int, int] = {}
        """Of all requests, when each was last the load."""
        self._followers = 0
        self._beginning = 0
        self._rounds = 0

    def join(self) -> None:
        """Another request begins to follow, and its first round."""
        self._followers += 1
        self._beginning += 1

    def begun(self) -> None:
        """The first round of one that follows has ended."""
        self._beginning -= 1

    @property
    def is_burst(self) -> bool:
        """Whether so many begin that it is too early to say how long proposals may be."""
        return self._beginning > BURST

    def leave(self) -> None:
        """One that followed has ended; its first round had before."""
        self._followers -= 1

    @property
    def tokens(self) -> int:
        """How many tokens a proposal is to have, at the load that there is."""
        return self._level().tokens

    def add(self, wanted: int | None, accepted: int = 0, seconds: float | None = None) -> None:
        """Count a round of a request that follows.

        Args:
            wanted: What `tokens` had said; None where it was not asked.
            accepted: Tokens of the proposal that the round committed.
            seconds: What all of the round took; None where that says nothing about the length.
        """
        self._rounds += 1
        self._loads.append(self._load())
        self._level().add(wanted, accepted, seconds, self._followers)

    def _level(self) -> Lengths:
        """That of the load that there is, made or begun anew where that is due."""
        size = _size(max((self._load(), *self._loads)))
        if size not in self._levels:
            self._levels[size] = Lengths(self._most, self._first(size))
        elif self._rounds - self._seen_rounds[size] > FIRST_STAY_ROUNDS * self._followers:
            self._levels[size].interrupt()  # what it had begun to compare was long ago
        self._seen_rounds[size] = self._rounds
        return self._levels[size]

    def _first(self, size: int) -> int:
        """Tokens that a new load begins with: those of the nearest one, few by few and many by many."""
        are_many = size >= _size(MANY)
        alike = [other for other in self._levels if (other >= _size(MANY)) == are_many]
        nearest = min(alike, key=lambda other: abs(other - size), default=None)
        if nearest is not None:
            return self._levels[nearest].kept
        return 0 if are_many else self._most


def _size(load: int) -> int:
    """What loads of one level have in common: 1, 2, 3 to 5, 6 to 11, 12 to 23, ..."""
    return (load * 4 // 3).bit_length()
