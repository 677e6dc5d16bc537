"""How long proposals may be where many requests run at once: tokens in a time decide. No clock.

Where reading the weights takes the time, the tokens of a proposal are verified almost for nothing; where many sequences
share a step, computing takes it, and every rejected token costs. One request cannot find out, for what it measures
with fewer is a step in which the others verify as many as before. So all of them halve or double their proposals for a
moment, now and then, and keep to what was better; halved often enough, the target works alone. Few begin with what they
asked for. Many begin with the target alone, which is never worse, and draft once that was found to be faster. vLLM's
`disable_by_batch_size` drew one such line by hand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from statistics import median

LEAST_LOAD = 4
"""Requests at once, below which each decides for itself."""
MANY = 12
"""Requests at once, from which on the target works alone until drafting was found to be faster."""
BURST = 4
"""Requests in their first round at once, beyond which one more does without a draft in that round: how many there will
be is not known yet, and a draft that is not asked in the end has read the prompt in vain."""
TURNS = 3
"""A comparison takes turns: so often the other length, and so often the one kept. What comes and goes meanwhile, as
prompts that are read, then slows down both."""
TURN_ROUNDS = 2
"""Rounds of each request in one turn."""
SETTLING_ROUNDS = 1
"""Rounds of each request before, which do not count: they share steps with the length before."""
FIRST_STAY_ROUNDS = 64
LONGEST_STAY_ROUNDS = 1024
"""Rounds of each request between two comparisons, once both neighbours of a length were found worse."""
LEAST_ADVANTAGE = 1.1
"""A longer proposal must make so many times the tokens: less may be noise, and of two that are as fast, the shorter one
leaves more of the draft to others."""
CLEAR = 1.25
"""Times the tokens by which the shorter of two lengths must be the better one for a comparison to take no more turns:
what is so much slower costs too. That the longer one is better is never decided in a hurry."""

_TURN_ROUNDS = SETTLING_ROUNDS + TURN_ROUNDS

logger = logging.getLogger(__name__)


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
        # It, its half and so on, the last one 0: the target works alone.
        self._lengths = [num_speculative_tokens >> i for i in range(num_speculative_tokens.bit_length() + 1)]
        self._load = load
        self._levels: dict[int, _Level] = {}
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
        return self._lengths[0] if self._load() < LEAST_LOAD else self._level_now().tokens

    def add(self, wanted: int | None, committed: float = 0.0, seconds: float | None = None) -> None:
        """Count a round of a request that follows.

        Args:
            wanted: What `tokens` had said; None where it was not asked.
            committed: Tokens that the round committed.
            seconds: What it took to propose and to verify; None where that says nothing about the length.
        """
        self._rounds += 1
        if self._load() >= LEAST_LOAD:
            self._level_now().add(wanted, committed, seconds, self._followers)

    def _level_now(self) -> _Level:
        """That of the load that there is, made or begun anew where that is due."""
        size = _size(self._load())
        if size not in self._levels:
            self._levels[size] = _Level(self._lengths, self._first(size))
        level = self._levels[size]
        if self._rounds - level.seen_rounds > _TURN_ROUNDS * self._followers:
            level.restart()  # what it had begun to compare was long ago
        level.seen_rounds = self._rounds
        return level

    def _first(self, size: int) -> int:
        """Index of the length that a new load begins with: that of the nearest one, few by few and many by many."""
        are_many = size >= _size(MANY)
        alike = [other for other in self._levels if (other >= _size(MANY)) == are_many]
        nearest = min(alike, key=lambda other: abs(other - size), default=None)
        if nearest is not None:
            return self._levels[nearest].kept
        return len(self._lengths) - 1 if are_many else 0


def _size(load: int) -> int:
    """What loads of one level have in common: 4 to 5, 6 to 11, 12 to 23, ..."""
    return (load * 4 // 3).bit_length()


class _Level:
    """One load: climbs to the best length by its neighbours, and then tries them ever more rarely."""

    def __init__(self, lengths: Sequence[int], first: int) -> None:
        self._lengths = lengths
        self._tried = first
        """Index of the length that is proposed now."""
        self.kept = first
        """Index of the best length so far."""
        self.seen_rounds = 0
        """Of all requests, when it was last the load."""
        self._direction = 1 if first < len(lengths) - 1 else -1
        self._failures = 0
        """Comparisons in a row that found nothing better. One that left no doubt counts for two, since a comparison
        costs what the worse length costs; so does one after which there is no length left on the other side."""
        self._turns_left = 0
        """Of the comparison; 0 between two of them."""
        self._rounds = 0
        self._wanted_rounds = SETTLING_ROUNDS
        self._kept_rounds, self._other_rounds = _Measured(), _Measured()

    @property
    def tokens(self) -> int:
        """See `Restraint.tokens`."""
        return self._lengths[self._tried]

    def restart(self) -> None:
        """Forget the comparison in progress, if there is one."""
        if self._turns_left:
            self._turns_left = 0
            self._begin(self.kept, SETTLING_ROUNDS)

    def add(self, wanted: int | None, committed: float, seconds: float | None, followers: int) -> None:
        """See `Restraint.add`."""
        if wanted is not None and wanted != self.tokens:
            return
        self._rounds += 1
        if self._turns_left and seconds is not None and self._rounds > SETTLING_ROUNDS * followers:
            measured = self._kept_rounds if self._tried == self.kept else self._other_rounds
            measured.add(committed, seconds)
        if self._rounds >= self._wanted_rounds * followers:
            self._end_turn(followers)

    def _end_turn(self, followers: int) -> None:
        if self._turns_left == 0:
            self._compare()
        elif self._turns_left == 1 or (self._is_fair and self._is_clear):
            self._decide(followers)
        else:
            self._turns_left -= 1
            self._begin(self._other if self._tried == self.kept else self.kept, _TURN_ROUNDS)

    @property
    def _other(self) -> int:
        """Index of the neighbour that is compared."""
        return self.kept + self._direction

    @property
    def _advantage(self) -> float:
        """Of the neighbour, over the length kept."""
        return self._other_rounds.rate / max(self._kept_rounds.rate, 1e-9)

    @property
    def _is_fair(self) -> bool:
        """Whether, with the turn that ends, either length has had as many."""
        return self._turns_left % 2 == 1

    @property
    def _is_clear(self) -> bool:
        """Whether the shorter length is so much better that more turns would be a waste."""
        if self._kept_rounds.rate <= 0.0 or self._other_rounds.rate <= 0.0:
            return False
        return (self._advantage if self._other > self.kept else 1.0 / self._advantage) > CLEAR

    def _compare(self) -> None:
        """The end of a stay: take turns with a neighbour."""
        self._kept_rounds, self._other_rounds = _Measured(), _Measured()
        self._turns_left = 2 * TURNS
        self._begin(self._other, _TURN_ROUNDS)

    def _decide(self, followers: int) -> None:
        """The end of a comparison."""
        advantage = self._advantage
        needed = 1.0 if self._other > self.kept else LEAST_ADVANTAGE
        if self._kept_rounds.rate > 0.0 and advantage > needed:
            self.kept = self._other
            self._failures = 0
            details = {
                "requests": followers,
                "tokens": self._lengths[self.kept],
                "advantage": round(advantage, 2),
            }
            logger.info("proposals change their length", extra=details)
        else:
            if self._is_clear:
                self._failures += 1
            self._turn_round()
        if not 0 <= self._other < len(self._lengths):
            self._turn_round()
        self._turns_left = 0
        self._begin(self.kept, self._stay_rounds)

    def _turn_round(self) -> None:
        """This way there is nothing better."""
        self._direction = -self._direction
        self._failures += 1

    @property
    def _stay_rounds(self) -> int:
        if self._failures < 2:
            return SETTLING_ROUNDS
        return min(FIRST_STAY_ROUNDS << min(self._failures - 2, 10), LONGEST_STAY_ROUNDS)

    def _begin(self, index: int, rounds: int) -> None:
        self._tried = index
        self._wanted_rounds = rounds
        self._rounds = 0


class _Measured:
    """What rounds of one length committed and took."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds: list[float] = []

    def add(self, committed: float, seconds: float) -> None:
        self._tokens += committed
        self._seconds.append(seconds)

    @property
    def rate(self) -> float:
        """Tokens a second of one request; 0 where nothing was measured. A hiccup of the machine does not move a
        median."""
        if not self._seconds:
            return 0.0
        return self._tokens / len(self._seconds) / max(median(self._seconds), 1e-9)
