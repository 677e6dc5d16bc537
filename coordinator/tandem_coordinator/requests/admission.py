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

from tandem.errors import CapacityError, DeadlineError, plural
from tandem.serving.fair_places import FairPlaces, extra_places
from tandem_coordinator.stats.speculation import MovingAverage

RETRY_SECONDS = 1.0
"""Time after which to try again, for a refusal that cannot tell when there will be room."""
MAX_BATCHES = 32
"""Maximum batches at once. Each may keep `batch.MAX_UNREAD_BYTES` of results for a caller that does not read."""
QUEUE = "max_queued_requests"
PER_PEER = "max_streams_per_peer"
BATCHES = "max_batches"
"""Limits that a request may meet."""
LARGE_BYTES = 16 << 10
"""Parsing a larger message takes a turn. Protobuf and pydantic parse a smaller one in at most 3 ms."""


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

    max_running: int
    max_queued: int
    max_streams_per_peer: int | None = None
    """None: as many as may run and wait."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._streams: Counter[str] = Counter()
        self._large = asyncio.Lock()
        self.places = FairPlaces(self.max_running, extra_places(self.max_running))
        self._unbounded = 0
        """Requests in the queue that are never refused: they had a place before, or their batch sends no other."""
        self.batches = 0
        self._preparing = 0
        """Requests whose prompts are made before they ask for a place."""
        self._held_seconds = MovingAverage()
        self.rejections = dict.fromkeys((QUEUE, PER_PEER, BATCHES), 0)
        """Requests that found no room, by the limit that they met."""

    @property
    def running(self) -> int:
        return self.places.held

    @property
    def queued(self) -> int:
        # One that has just been given its place waits no more, and is among the unbounded until its task runs.
        return max(self.places.waiting - self._unbounded, 0) + self._preparing

    @contextmanager
    def stream(self, peer: str) -> Iterator[None]:
        """Count a stream of this peer (`peer_of_grpc`, `peer_of_host`) while the block lasts. An unknown one, "", is
        not bounded."""
        most = self.max_streams_per_peer or self.max_running + self.max_queued
        if peer and self._streams[peer] >= most:
            self.rejections[PER_PEER] += 1
            raise CapacityError(
                f"{most} requests from {peer} run, wait or are not read, which is the most for one address; try again "
                "later",
                RETRY_SECONDS,
            )
        self._streams[peer] += 1
        try:
            yield
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    @contextmanager
    def batch(self, peer: str) -> Iterator[None]:
        """Count a batch of this peer while the block lasts. Its requests are no streams of the peer's."""
        if self.batches >= MAX_BATCHES:
            self.rejections[BATCHES] += 1
            raise CapacityError(
                f"{MAX_BATCHES} batches run, which is the most; try again later", RETRY_SECONDS
            )
        with self.stream(peer):
            self.batches += 1
            try:
                yield
            finally:
                self.batches -= 1

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until this large request may hold the interpreter, one at a time. All others run for twice as long
        after it. The block must not await anything: its duration decides when the next turn begins.

        Neither pydantic nor protobuf releases the interpreter while it parses, so a thread would not help. Without
        turns, large requests that arrive together are parsed back to back, and every stream of the process waits.
        """
        await self._large.acquire()
        began = time.perf_counter()
        try:
            yield
        finally:
            # Others have two thirds of the processor's time meanwhile
            rest = 2.0 * (time.perf_counter() - began)
            asyncio.get_running_loop().call_later(rest, self._large.release)

    @contextmanager
    def preparation(self, peer: str) -> Iterator[None]:
        """Count a request of this peer as one that waits while the block makes its prompt, before it asks for a
        place."""
        with self.stream(peer):
            self._preparing += 1
            try:
                yield
            finally:
                self._preparing -= 1

    def reject(self) -> CapacityError:
        """Count a request for which the queue has no room, and return its error, with the time after which to try
        again."""
        self.rejections[QUEUE] += 1
        # Until a place in the queue is free: during one request, as many requests end as can run
        waits = (self._held_seconds.value or 0.0) * (self.queued + 1) / self.max_running
        return CapacityError(
            f"{plural(self.running, 'request')} {'runs' if self.running == 1 else 'run'} and {self.queued} wait, "
            "which is the most; try again later",
            min(max(waits, 0.1), 60.0),  # never at once, and within a client's own patience
        )

    @asynccontextmanager
    async def place(
        self, deadline_seconds: float | None, client: str = "", priority: int = 0, *, in_batch: bool = False
    ) -> AsyncIterator[Place]:
        """A place for as long as the block lasts, had within the deadline. The request may release it in between. One
        of a batch waits however many others do, as a request of another client than those that come by themselves."""
        if in_batch:
            client = f"batches of {client}"
        elif not self.places.has_room(client) and self.queued >= self.max_queued:
            raise self.reject()
        try:
            async with asyncio.timeout(deadline_seconds):
                if in_batch:
                    await self._wait_unbounded(client, priority)
                else:
                    await self.places.take(client, priority)
        except TimeoutError:
            raise DeadlineError(
                f"the request waited {deadline_seconds:g} s for a place, which is all it was given"
            ) from None
        place = Place(self, client, priority)
        try:
            yield place
        finally:
            place.release()
            self._held_seconds.add(place.held_seconds)

    async def _wait_unbounded(self, client: str, priority: int) -> None:
        """Wait for a place without being one of those whose number is bounded."""
        self._unbounded += 1
        try:
            await self.places.take(client, priority)
        finally:
            self._unbounded -= 1

    def refuses(self, client: str = "") -> bool:
        """True if a new request of the client would be refused; without one, if it would unless its client has few."""
        room = max(self.max_running - self.running, 1) if self.places.has_room(client) else 0
        return self.queued >= self.max_queued + room


class Place:
    """A request's place. The request may release it, and take one again later."""

    def __init__(self, admission: Admission, client: str, priority: int = 0) -> None:
        self.held_seconds = 0.0
        """Seconds for which it was held, without the time since it was last taken."""
        self.client = client
        """The address of the request's client; empty: not known."""
        self._priority = priority
        self._admission = admission
        self._since: float | None = admission.clock()

    def release(self) -> None:
        if self._since is not None:
            self.held_seconds += self._admission.clock() - self._since
            self._since = None
            self._admission.places.leave(self.client)

    async def take_again(self) -> None:
        """Wait for a place again, behind the client's other requests. One that has begun is never refused."""
        await self._admission._wait_unbounded(self.client, self._priority)
        self._since = self._admission.clock()
