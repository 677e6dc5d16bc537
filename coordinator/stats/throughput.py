"""Tokens per second over the last while: a count for each of the last sixty seconds, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_SECONDS = 60
"""Longest time that a rate can be asked for."""


class TokenCounter:
    """Counts tokens as they are committed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = 0
        """Since the start."""
        self._clock = clock
        self._started = clock()
        # Slot `second % 60` counts for that second; another second's count is found by its number and thrown away.
        self._counts = [0] * LONGEST_SECONDS
        self._seconds = [-1] * LONGEST_SECONDS

    def add(self, count: int) -> None:
        """Count tokens now."""
        second = int(self._clock() - self._started)
        slot = second % LONGEST_SECONDS
        if self._seconds[slot] != second:
            self._seconds[slot], self._counts[slot] = second, 0
        self._counts[slot] += count
        self.total += count

    def rate(self, seconds: int) -> float:
        """Tokens per second over the last `seconds`, or since the start if that was later.

        The current second counts in part.
        """
        now = self._clock() - self._started
        oldest = int(now) - seconds + 1
        counted = sum(
            count
            for second, count in zip(self._seconds, self._counts, strict=True)
            if second >= max(oldest, 0)
        )
        elapsed = now - max(oldest, 0)
        return counted / elapsed if elapsed > 0 else 0.0
