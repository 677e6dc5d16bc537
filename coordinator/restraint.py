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

LEAST_LOAD = 4
"""Requests at once, below which each decides for itself."""
TRIAL_ROUNDS = 6
"""Rounds of each request before another length is tried."""
PROBE_ROUNDS = 3
"""Rounds of each request with the other length."""
SETTLING_ROUNDS = 1
"""Rounds of each request that do not count after a change: they share steps with the length before."""
FIRST_STAY_ROUNDS = 32
LONGEST_STAY_ROUNDS = 512
"""Rounds between two probes, once both neighbours of a length were found worse."""
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
    """One load: climbs to the best length by its neighbours, and then probes them ever more rarely."""

    def __init__(self) -> None:
        self.halvings = 0
        """Of the length that is tried."""
        self.most_halvings = 1
        """That leave nothing to propose."""
        self._kept = 0
        """Of the length that is kept when the probe fails."""
        self._kept_rate = 0.0
        self._direction = 1
        self._failures = 0
        """Probes in a row that were no better."""
        self._settling_rounds, self._wanted_rounds = 0, TRIAL_ROUNDS
        self._rounds = 0
        self._tokens = self._seconds = 0.0

    def add(self, tokens: float, seconds: float, halvings: int, load: int) -> None:
        """See `Restraint.add`."""
        if halvings != self.halvings:
            return
        self._rounds += 1
        if self._rounds <= self._settling_rounds * load:
            return
        # What was long ago fades: a stay of minutes ends under other conditions than it began.
        remains = 1.0 - 1.0 / (TRIAL_ROUNDS * load)
        self._tokens = remains * self._tokens + tokens
        self._seconds = remains * self._seconds + seconds
        if self._rounds >= (self._settling_rounds + self._wanted_rounds) * load:
            rate = self._tokens / max(self._seconds, 1e-9)
            if self.halvings == self._kept:
                self._kept_rate = rate
                self._probe()
            else:
                self._decide(rate, load)

    def _probe(self) -> None:
        """The end of a stay: try a neighbour."""
        if not 0 <= self._kept + self._direction <= self.most_halvings:
            self._direction = -self._direction
            self._failures += 1
        self._begin(self._kept + self._direction, PROBE_ROUNDS)

    def _decide(self, rate: float, load: int) -> None:
        """The end of a probe."""
        advantage = rate / max(self._kept_rate, 1e-9)
        if advantage > LEAST_ADVANTAGE:
            logger.info(
                "proposals change their length",
                extra={"requests": load, "halvings": self.halvings, "advantage": round(advantage, 2)},
            )
            self._kept = self.halvings
            self._failures = 0
        else:
            self._direction = -self._direction
            self._failures += 1
        self._begin(self._kept, self._stay_rounds)

    @property
    def _stay_rounds(self) -> int:
        if self._failures < 2:
            return TRIAL_ROUNDS
        return min(FIRST_STAY_ROUNDS << min(self._failures - 2, 10), LONGEST_STAY_ROUNDS)

    def _begin(self, halvings: int, rounds: int) -> None:
        self._settling_rounds = SETTLING_ROUNDS if halvings != self.halvings else 0
        self.halvings = halvings
        self._wanted_rounds = rounds
        self._rounds = 0
        self._tokens = self._seconds = 0.0
