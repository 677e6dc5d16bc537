"""How many requests may run at once, how many may wait for that, and what the others are told."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tandem.errors import CapacityError, DeadlineError

_LEAST_RETRY_SECONDS, _MOST_RETRY_SECONDS = 0.1, 60.0
# Weight of the last request in the moving average of how long requests take.
_NEWEST = 0.1


class Admission:
    """Gives each request a place to run in, first come, first served, and refuses at once when too many wait."""

    def __init__(
        self,
        max_concurrent_requests: int,
        max_queued_requests: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.running = 0
        """Requests that have a place."""
        self._most_running = max_concurrent_requests
        self._most_queued = max_queued_requests
        self._clock = clock
        self._queue: deque[asyncio.Future[None]] = deque()
        self._usual_seconds = 0.0

    @property
    def queued(self) -> int:
        """Requests that wait for a place."""
        return len(self._queue)

    @property
    def is_full(self) -> bool:
        """Whether whoever comes now is refused."""
        return not self._has_room and self.queued >= self._most_queued

    def refusal(self) -> CapacityError:
        """What is told to those who are refused, and when to try again."""
        return CapacityError(
            f"{self.running} requests run and {self.queued} wait, which is the most; try again later",
            self._retry_seconds,
        )

    @asynccontextmanager
    async def place(self, deadline_seconds: float | None) -> AsyncIterator[None]:
        """A place, for as long as the block lasts.

        Args:
            deadline_seconds: How long the client waits at most; None: without end.

        Raises:
            CapacityError: too many run and wait already. It says when to try again.
            DeadlineError: there was no place within that time.
        """
        await self._enter(deadline_seconds)
        began = self._clock()
        try:
            yield
        finally:
            self._note(self._clock() - began)
            self._leave()

    async def _enter(self, deadline_seconds: float | None) -> None:
        if self.is_full:
            raise self.refusal()
        if self._has_room:
            self.running += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            async with asyncio.timeout(deadline_seconds):
                await turn  # whoever leaves hands its place over: `running` stays as it is
        except BaseException as error:
            self._give_up(turn)
            if isinstance(error, TimeoutError):
                raise DeadlineError(
                    f"the request waited {deadline_seconds:g} s for a place, which is all it was given"
                ) from None
            raise

    @property
    def _has_room(self) -> bool:
        return self.running < self._most_running and not self._queue

    def _give_up(self, turn: asyncio.Future[None]) -> None:
        if turn in self._queue:
            self._queue.remove(turn)
        elif turn.done() and not turn.cancelled():
            self._leave()  # the place came in the moment in which the request went

    def _leave(self) -> None:
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1

    def _note(self, seconds: float) -> None:
        self._usual_seconds += _NEWEST * (seconds - self._usual_seconds) if self._usual_seconds else seconds

    @property
    def _retry_seconds(self) -> float:
        """When a place in the queue is likely to be free: as many requests as can run end in the time of one."""
        waits = self._usual_seconds * (self.queued + 1) / self._most_running
        return min(max(waits, _LEAST_RETRY_SECONDS), _MOST_RETRY_SECONDS)
