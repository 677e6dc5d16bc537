"""Admission: bounds on running and waiting requests, and the refusal of all others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tandem.errors import CapacityError, DeadlineError
from tandem.fair_places import FairPlaces, extra_places
from tandem.plural import plural

_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.1, 60.0
# Weight of the last request in the moving average of how long requests take.
_NEWEST = 0.1


class Admission:
    """Gives each request a place, fairly among clients, and refuses it at once when too many wait."""

    def __init__(
        self,
        max_concurrent_requests: int,
        max_queued_requests: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._places = FairPlaces(max_concurrent_requests, extra_places(max_concurrent_requests))
        self._max_running = max_concurrent_requests
        self._max_queued = max_queued_requests
        self._clock = clock
        self._returning = 0
        """Requests in the queue that had a place before."""
        self._usual_seconds = 0.0

    @property
    def running(self) -> int:
        """Requests that have a place."""
        return self._places.held

    @property
    def queued(self) -> int:
        """Requests that wait for their first place."""
        return self._places.waiting - self._returning

    @property
    def is_full(self) -> bool:
        """True if a new request would be refused, unless its client has few."""
        return self._refuses("")

    def refusal(self) -> CapacityError:
        """The error for refused requests, with the time after which to try again."""
        return CapacityError(
            f"{plural(self.running, 'request')} {'runs' if self.running == 1 else 'run'} and {self.queued} wait, "
            "which is the most; try again later",
            self._retry_seconds,
        )

    @asynccontextmanager
    async def place(self, deadline_seconds: float | None, client: str = "") -> AsyncIterator[Place]:
        """A place for as long as the block lasts. The request may release it in between.

        Args:
            deadline_seconds: How long the client waits at most; None: forever.
            client: The client's address; empty: not known.

        Raises:
            CapacityError: too many run and wait already. It says when to try again.
            DeadlineError: there was no place within that time.
        """
        await self._enter(deadline_seconds, client)
        place = Place(self, client, self._clock)
        try:
            yield place
        finally:
            place.release()
            self._note(place.held_seconds)

    async def _enter(self, deadline_seconds: float | None, client: str) -> None:
        if self._refuses(client):
            raise self.refusal()
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._places.take(client)
        except TimeoutError:
            raise DeadlineError(
                f"the request waited {deadline_seconds:g} s for a place, which is all it was given"
            ) from None

    async def _return(self, client: str) -> None:
        """Wait for a place again, behind the client's other requests. One that has begun is never refused."""
        self._returning += 1
        try:
            await self._places.take(client)
        finally:
            self._returning -= 1

    def _refuses(self, client: str) -> bool:
        return not self._places.has_room(client) and self.queued >= self._max_queued

    def _note(self, seconds: float) -> None:
        self._usual_seconds += _NEWEST * (seconds - self._usual_seconds) if self._usual_seconds else seconds

    @property
    def _retry_seconds(self) -> float:
        """Estimated seconds until a place in the queue is free: during one request, as many requests end as can
        run."""
        waits = self._usual_seconds * (self.queued + 1) / self._max_running
        return min(max(waits, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)


class Place:
    """A request's place. The request may release it, and take one again later."""

    def __init__(self, admission: Admission, client: str, clock: Callable[[], float]) -> None:
        self.held_seconds = 0.0
        """Seconds for which it was held, without the time since it was last taken."""
        self.client = client
        """The address of the request's client; empty: not known."""
        self._admission = admission
        self._clock = clock
        self._since: float | None = clock()

    def release(self) -> None:
        """Give it to the next request."""
        if self._since is not None:
            self.held_seconds += self._clock() - self._since
            self._since = None
            self._admission._places.leave(self.client)

    async def take_again(self) -> None:
        """Wait for a place again."""
        if self._since is None:
            await self._admission._return(self.client)
            self._since = self._clock()
