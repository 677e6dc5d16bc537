"""A moment by which something must have ended."""

from __future__ import annotations

import math
import time


class Deadline:
    """A deadline so many seconds from now, or none."""

    def __init__(self, seconds: float | None) -> None:
        self._moment = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def remaining_seconds(self) -> float | None:
        """Remaining seconds, at least 0; None without a deadline."""
        return None if math.isinf(self._moment) else max(0.0, self._moment - time.monotonic())

    def at_most(self, seconds: float) -> float:
        """Remaining seconds, at most `seconds`."""
        return min(seconds, max(0.0, self._moment - time.monotonic()))
