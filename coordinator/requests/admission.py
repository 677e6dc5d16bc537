"""Admission: which address counts as a client, bounds on running and waiting requests, the refusal of all others."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from urllib.parse import unquote

from coordinator.stats.speculation import MovingAverage
from tandem.errors import CapacityError, DeadlineError
from tandem.fair_places import FairPlaces, extra_places
from tandem.plural import plural

RETRY_SECONDS = 1.0
"""Time after which to try again, for a refusal that cannot tell when there will be room."""


class Peers:
    """Counts the streams of each client address."""

    def __init__(self, max_streams: int) -> None:
        self._max_streams = max_streams
        self._streams: Counter[str] = Counter()

    @contextmanager
    def stream(self, peer: str) -> Iterator[None]:
        """Count a stream of this peer (`peer_of_grpc`, `peer_of_host`) while the block lasts. An unknown one, "", is
        not bounded."""
        if not peer:
            yield
            return
        if self._streams[peer] >= self._max_streams:
            raise CapacityError(
                f"{self._max_streams} requests from {peer} run, wait or are not read, which is the most for one "
                "address; try again later",
                RETRY_SECONDS,
            )
        self._streams[peer] += 1
        try:
            yield
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]


def peer_of_grpc(peer: str) -> str:
    """The address in gRPC's name of a peer, which is such as `ipv4:127.0.0.1:5000` or `ipv6:%5B::1%5D:5000`."""
    kind, _, address = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    return peer_of_host(unquote(address).rpartition(":")[0].strip("[]"))


def peer_of_host(host: str) -> str:
    """The address by which the streams of a host are counted: its own, or the network of its IPv6 address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None or address.is_loopback:
        return str(address.ipv4_mapped or address)
    # A client with one IPv6 address controls a network of this size
    return str(ipaddress.ip_network((address, 64), strict=False))


@dataclass(eq=False)
class Admission:
    """Gives each request a place, fairly among clients, and refuses it at once when too many wait."""

    _max_running: int
    _max_queued: int
    _clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._places = FairPlaces(self._max_running, extra_places(self._max_running))
        self._returning = 0
        """Requests in the queue that had a place before."""
        self._held_seconds = MovingAverage()

    @property
    def running(self) -> int:
        return self._places.held

    @property
    def queued(self) -> int:
        return self._places.waiting - self._returning

    @property
    def is_full(self) -> bool:
        """True if a new request would be refused, unless its client has few."""
        return self._refuses("")

    def refusal(self) -> CapacityError:
        """The error for refused requests, with the time after which to try again."""
        # Until a place in the queue is free: during one request, as many requests end as can run
        waits = (self._held_seconds.value or 0.0) * (self.queued + 1) / self._max_running
        return CapacityError(
            f"{plural(self.running, 'request')} {'runs' if self.running == 1 else 'run'} and {self.queued} wait, "
            "which is the most; try again later",
            min(max(waits, 0.1), 60.0),  # never at once, and within a client's own patience
        )

    @asynccontextmanager
    async def place(self, deadline_seconds: float | None, client: str = "") -> AsyncIterator[Place]:
        """A place for as long as the block lasts, had within the deadline. The request may release it in between."""
        if self._refuses(client):
            raise self.refusal()
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._places.take(client)
        except TimeoutError:
            raise DeadlineError(
                f"the request waited {deadline_seconds:g} s for a place, which is all it was given"
            ) from None
        place = Place(self, client, self._clock)
        try:
            yield place
        finally:
            place.release()
            self._held_seconds.add(place.held_seconds)

    def _refuses(self, client: str) -> bool:
        return not self._places.has_room(client) and self.queued >= self._max_queued


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
        if self._since is not None:
            self.held_seconds += self._clock() - self._since
            self._since = None
            self._admission._places.leave(self.client)

    async def take_again(self) -> None:
        """Wait for a place again, behind the client's other requests. One that has begun is never refused."""
        if self._since is not None:
            return
        self._admission._returning += 1
        try:
            await self._admission._places.take(self.client)
        finally:
            self._admission._returning -= 1
        self._since = self._clock()
