"""A moment by which something must have ended."""

from __future__ import annotations

import math
import time


class Deadline:
    """So many seconds from now, or never."""

    def __init__(self, seconds: float | None) -> None:
        self._moment = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def remaining_seconds(self) -> float | None:
        """What is left, at least 0; None: without end."""
        return None if math.isinf(self._moment) else max(0.0, self._moment - time.monotonic())

    def at_most(self, seconds: float) -> float:
        """What is left, and no more than this."""
        return min(seconds, max(0.0, self._moment - time.monotonic()))
