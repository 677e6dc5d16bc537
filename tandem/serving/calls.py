"""The calls that a server runs now: a drain waits for their end, and cuts off what takes too long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tandem.errors import ServiceUnavailableError


class RunningCalls:
    """All calls except health checks, whose watchers stay as long as the server."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()
        self._none_runs = asyncio.Event()
        self._none_runs.set()
        self._cut_because = ""

    def __len__(self) -> int:
        return len(self._tasks)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Count the task that runs the block as a call.

        Raises:
            ServiceUnavailableError: the call was cut off.
        """
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._none_runs.clear()
        try:
            yield
        except asyncio.CancelledError:
            if not self._cut_because:
                raise
            task.uncancel()
            raise ServiceUnavailableError(self._cut_because) from None
        finally:
            self._tasks.discard(task)
            if not self._tasks:
                self._none_runs.set()

    async def end(self, seconds: float) -> bool:
        """Wait for the end of all. False when some still run after that time."""
        try:
            async with asyncio.timeout(seconds):
                await self._none_runs.wait()
        except TimeoutError:
            return False
        return True

    def cut_off(self, because: str) -> None:
        """End the running calls with UNAVAILABLE and the reason."""
        self._cut_because = because
        for task in self._tasks:
            task.cancel()
