"""How long steps take: the durations that are published, and a watchdog for a step that does not end."""

from __future__ import annotations

import time
from collections.abc import Callable

from tandem.engine.core.jobs import StepRecord
from tandem.model.types import StepProfile


class StepTimes:
    """Durations of steps with rows for all tokens: measured once the engine is warm, then by the steps it makes."""

    def __init__(self) -> None:
        self.profile = StepProfile()
        self._seconds: dict[tuple[int, int], float] = {}

    def measured(self, seconds: dict[tuple[int, int], float]) -> None:
        """Publish these, by number of sequences and tokens of each."""
        self._seconds = dict(seconds)
        self.profile = StepProfile(seconds, int(time.time()))

    def add(self, record: StepRecord) -> None:
        """Count a step. Once a size takes another time than published by a quarter, all are published anew."""
        passes = record.pass_count
        size = record.sequence_count, record.token_count // max(record.sequence_count * passes, 1)
        known = self._seconds.get(size)
        is_even = size[0] * size[1] * passes == record.token_count
        if known is None or not is_even or record.row_count < record.token_count:
            return
        # A pause of the machine counts as twice the time; two dozen steps make the mean.
        now = self._seconds[size] = known + (min(record.seconds / passes, 2.0 * known) - known) / 24.0
        if not 0.8 < now / self.profile.seconds[size] < 1.25:
            self.measured(self._seconds)


LEAST_SECONDS = 30.0
"""No step of a machine that is merely slow or busy is suspected before."""
MOST_SECONDS = 600.0
"""Maximum bound, however slow the first steps were."""
MARGIN = 4.0
"""Factor on the time of a step at the slowest recent rate."""


class StepWatchdog:
    """Notices a step that does not end: a device that hangs, a driver that waits forever, a kernel that loops. Nothing
    can end such a step from outside, but the service must report that it is not healthy. The engine's thread calls
    `begin` and `end`, any other thread asks."""

    def __init__(
        self, fixed_seconds: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """A step may take `fixed_seconds`; None learns it."""
        self._fixed_seconds = fixed_seconds
        self._clock = clock
        self._slowest_token_seconds = 0.0
        # One attribute, so that a reader on another thread sees both or neither.
        self._running: tuple[float, int] | None = None

    def begin(self, token_count: int) -> None:
        self._running = self._clock(), token_count

    def end(self) -> None:
        running = self._running
        self._running = None
        if running is not None:
            began, token_count = running
            per_token = (self._clock() - began) / max(token_count, 1)
            # Half after some thirty others: the first step of a size may be slow
            self._slowest_token_seconds = max(per_token, 0.98 * self._slowest_token_seconds)

    @property
    def overdue_seconds(self) -> float:
        """How long the step in progress has taken, once that is longer than it may take; 0 otherwise."""
        running = self._running
        if running is None:
            return 0.0
        began, token_count = running
        seconds = self._clock() - began
        return seconds if seconds > self.bound_seconds(token_count) else 0.0

    def bound_seconds(self, token_count: int) -> float:
        if self._fixed_seconds is not None:
            return self._fixed_seconds
        return min(max(LEAST_SECONDS, MARGIN * token_count * self._slowest_token_seconds), MOST_SECONDS)
