"""How long proposals may be where many requests run at once: tokens in a time decide. No clock.

Where reading the weights takes the time, the tokens of a proposal are verified almost for nothing; where many sequences
share a step, computing takes it, and every rejected token costs. One request cannot find out, for what it measures
with fewer is a step in which the others verify as many as before. So all of them halve or double their proposals for a
moment, now and then, and keep to what was better; halved often enough, the target works alone. vLLM's
`disable_by_batch_size` drew one such line by hand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from statistics import median

LEAST_LOAD = 4
"""Requests at once, below which each decides for itself."""
WINDOWS = 3
"""A comparison takes turns: so often the other length, and so often the one kept. What comes and goes meanwhile, as
prompts that are read, then slows down both."""
WINDOW_ROUNDS = 2
"""Rounds of each request in one turn."""
SETTLING_ROUNDS = 1
"""Rounds of each request before, which do not count: they share steps with the length before."""
FIRST_STAY_ROUNDS = 64
LONGEST_STAY_ROUNDS = 1024
"""Rounds of each request between two comparisons, once both neighbours of a length were found worse."""
LEAST_ADVANTAGE = 1.03
"""Another length must make so many times the tokens; less may be noise."""

logger = logging.getLogger(__name__)


class Restraint:
    """Follows the rounds of all requests, for each load on its own: doubling it makes another."""

    def __init__(self, load: Callable[[], int]) -> None:
        """
        Args:
            load: How many requests run.
        """
        self._load = load
        self._levels: dict[int, _Level] = {}

    def halvings(self, num_speculative_tokens: int) -> int:
        """How often a request is to halve the tokens that it would propose, at the load that there is."""
        if self._load() < LEAST_LOAD:
            return 0
        level = self._level
        level.most_halvings = num_speculative_tokens.bit_length()
        return min(level.halvings, level.most_halvings)

    def add(self, tokens: float, seconds: float, halvings: int) -> None:
        """Count a round of some request: what it committed, what it took to propose and to verify, and how it was
        restrained."""
        load = self._load()
        if load >= LEAST_LOAD:
            self._level.add(tokens, seconds, halvings, load)

    @property
    def _level(self) -> _Level:
        return self._levels.setdefault(self._load().bit_length(), _Level())


class _Level:
    """One load: climbs to the best length by its neighbours, and then tries them ever more rarely."""

    def __init__(self) -> None:
        self.halvings = 0
        """Of the length that is proposed now."""
        self.most_halvings = 1
        """That leave nothing to propose."""
        self._kept = 0
        """Of the best length so far."""
        self._direction = 1
        self._failures = 0
        """Comparisons in a row that found nothing better."""
        self._windows_left = 0
        """Of the comparison; 0 between two of them."""
        self._rounds = 0
        self._wanted_rounds = SETTLING_ROUNDS
        self._measured: dict[int, _Measured] = {}

    def add(self, tokens: float, seconds: float, halvings: int, load: int) -> None:
        """See `Restraint.add`."""
        if halvings != self.halvings:
            return
        self._rounds += 1
        if self._windows_left and self._rounds > SETTLING_ROUNDS * load:
            self._measured.setdefault(halvings, _Measured()).add(tokens, seconds)
        if self._rounds >= self._wanted_rounds * load:
            self._end_turn(load)

    def _end_turn(self, load: int) -> None:
        if self._windows_left == 0:
            self._compare()
        elif self._windows_left == 1:
            self._decide(load)
        else:
            self._windows_left -= 1
            other = self._kept + self._direction
            self._begin(other if self.halvings == self._kept else self._kept, SETTLING_ROUNDS + WINDOW_ROUNDS)

    def _compare(self) -> None:
        """The end of a stay: take turns with a neighbour."""
        if not 0 <= self._kept + self._direction <= self.most_halvings:
            self._direction = -self._direction
            self._failures += 1
        self._measured.clear()
        self._windows_left = 2 * WINDOWS
        self._begin(self._kept + self._direction, SETTLING_ROUNDS + WINDOW_ROUNDS)

    def _decide(self, load: int) -> None:
        """The end of a comparison."""
        other = self._kept + self._direction
        advantage = self._measured[other].rate / max(self._measured[self._kept].rate, 1e-9)
        if advantage > LEAST_ADVANTAGE:
            logger.info(
                "proposals change their length",
                extra={"requests": load, "halvings": other, "advantage": round(advantage, 2)},
            )
            self._kept = other
            self._failures = 0
        else:
            self._direction = -self._direction
            self._failures += 1
        self._windows_left = 0
        self._begin(self._kept, self._stay_rounds)

    @property
    def _stay_rounds(self) -> int:
        if self._failures < 2:
            return SETTLING_ROUNDS
        return min(FIRST_STAY_ROUNDS << min(self._failures - 2, 10), LONGEST_STAY_ROUNDS)

    def _begin(self, halvings: int, rounds: int) -> None:
        self.halvings = halvings
        self._wanted_rounds = rounds
        self._rounds = 0


class _Measured:
    """What rounds of one length committed and took."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds: list[float] = []

    def add(self, tokens: float, seconds: float) -> None:
        self._tokens += tokens
        self._seconds.append(seconds)

    @property
    def rate(self) -> float:
        """Tokens a second of one request. A hiccup of the machine does not move a median."""
        return self._tokens / len(self._seconds) / max(median(self._seconds), 1e-9)
