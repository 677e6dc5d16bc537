"""A wait for whatever arrives next, with a time limit that costs nothing when it is not reached."""

from __future__ import annotations

import asyncio
import time


class Arrivals:
    """Wakes one waiting task when something arrives, or at its time limit.

    Waits follow each other by the thousand and end long before their limits. So a timer outlives its wait: when it
    fires, it starts anew for the wait of that moment. `asyncio.wait` starts and cancels one for each.
    """

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._fires_at = 0.0

    def notify(self) -> None:
        """Something arrived."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def next(self, until: float) -> asyncio.Future[None]:
        """The next arrival, which is awaited at once, but not beyond a moment of the monotonic clock."""
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        self._until = until
        if self._timer is None or self._fires_at > until:
            self._start(loop)
        return waiter

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.close()
        self._fires_at = self._until
        self._timer = loop.call_later(max(self._until - time.monotonic(), 0.0), self._fire, loop)

    def _fire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if time.monotonic() >= self._until:
            self._waiter.set_result(None)
        else:
            self._start(loop)
