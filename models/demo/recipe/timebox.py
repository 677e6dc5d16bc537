"""Training that ends on the clock: the learning rate follows the time spent, not a step count."""

import time
from dataclasses import dataclass, field


@dataclass
class TimeBox:
    """A stretch of wall-clock time; `already_spent_seconds` is what a resumed run used before."""

    minutes: float
    already_spent_seconds: float = 0.0
    _started: float = field(default_factory=time.monotonic)

    @property
    def spent_seconds(self) -> float:
        """Seconds used, those of earlier runs included."""
        return self.already_spent_seconds + time.monotonic() - self._started

    @property
    def fraction(self) -> float:
        """The share of the time that is used, from 0 to 1."""
        return min(1.0, self.spent_seconds / (60 * self.minutes)) if self.minutes > 0 else 1.0

    @property
    def is_over(self) -> bool:
        """True if the time is used up."""
        return self.fraction >= 1.0


class Every:
    """Reports when an interval has passed since its last report."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = time.monotonic()

    def is_due(self) -> bool:
        """True if the time has passed; if so, it starts again."""
        if time.monotonic() - self._last < self._seconds:
            return False
        self._last = time.monotonic()
        return True


def decayed(fraction: float, warm_up: float = 0.02, floor: float = 0.01) -> float:
    """The learning rate's factor: a short linear rise, then a straight line down to nearly nothing."""
    if fraction < warm_up:
        return max(floor, fraction / warm_up)
    return floor + (1 - floor) * (1 - fraction) / (1 - warm_up)
