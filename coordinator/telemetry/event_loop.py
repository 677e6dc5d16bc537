"""Measures how long the event loop takes to get to what has come."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

_INTERVAL_SECONDS = 0.005


class EventLoopProbe:
    """Wakes the loop from a thread at regular intervals, and times it.

    gRPC hands over an answer the same way: its own thread wakes the loop, whose next turn wakes the task that reads. So
    a probe waits as long as an answer that comes at the same moment. A loop that is held up for long is probed all the
    while, so that a long wait counts as often as it deserves.
    """

    def __init__(self, observe: Callable[[float], None], interval_seconds: float = _INTERVAL_SECONDS) -> None:
        """Begin with `start`.

        Args:
            observe: Receives each wait in seconds, on the event loop.
            interval_seconds: Time between two probes.
        """
        self._observe = observe
        self._interval_seconds = interval_seconds
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to probe the running loop."""
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(
            target=self._probe, args=(loop,), name="event loop probe", daemon=True
        )
        self._thread.start()

    async def close(self) -> None:
        """Stop."""
        self._ended.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    def _probe(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._ended.wait(self._interval_seconds):
            try:
                loop.call_soon_threadsafe(self._woken, loop, time.perf_counter())
            except RuntimeError:  # the loop was closed
                return

    def _woken(self, loop: asyncio.AbstractEventLoop, began: float) -> None:
        loop.call_soon(self._read, began)

    def _read(self, began: float) -> None:
        self._observe(time.perf_counter() - began)
