"""Places that clients share fairly: one that asks for hundreds of them delays no other."""

from __future__ import annotations

import asyncio
from collections import Counter
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple


class _Turn(NamedTuple):
    """A request that waits. They compare by what goes first."""

    priority: int
    number: int
    """In order of arrival."""
    future: asyncio.Future[None]


class FairPlaces:
    """A free place goes to the requests with the lowest priority value, of these to the client that holds the fewest
    places, and among equals in order of arrival (max-min fairness).

    Extra places are kept for clients that hold few, so that they need not wait until another leaves, as PostgreSQL
    keeps connections for administrators (`superuser_reserved_connections`). A request whose client is not known counts
    as one of a client with many. Belongs to one event loop.
    """

    def __init__(self, places: int, extra: int) -> None:
        self.held = 0
        self._places = places
        self._extra = extra
        self._held_by: Counter[str] = Counter()
        self._queues: dict[str, list[_Turn]] = {}
        """A heap of each client."""
        self._arrivals = count()

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def has_room(self, client: str) -> bool:
        """True if the client would get a place at once. Whoever waits already cannot have it."""
        # Those with few places may have one of the extra places
        holds_few = client != "" and self._held_by[client] < 4
        return self.held < self._places + (self._extra if holds_few else 0)

    async def take(self, client: str, priority: int = 0) -> None:
        """Wait for a place, which must be given back by `leave`. An empty client is one that is not known."""
        if self.has_room(client):
            self._give(client)
            return
        turn = _Turn(priority, next(self._arrivals), asyncio.get_running_loop().create_future())
        heappush(self._queues.setdefault(client, []), turn)
        try:
            await turn.future
        except BaseException:
            self._give_up(client, turn)
            raise

    def leave(self, client: str) -> None:
        self.held -= 1
        self._held_by[client] -= 1
        if not self._held_by[client]:
            del self._held_by[client]
        while able := [each for each in self._queues if self.has_room(each)]:
            favoured = min(able, key=self._place_in_line)
            turn = heappop(self._queues[favoured])
            self._forget_empty(favoured)
            if not turn.future.done():
                self._give(favoured)
                turn.future.set_result(None)

    def refuse_waiting(self, error: Exception) -> None:
        queues = self._queues
        self._queues = {}
        for queue in queues.values():
            for turn in queue:
                if not turn.future.done():
                    turn.future.set_exception(error)

    def _place_in_line(self, client: str) -> tuple[int, int, int]:
        first = self._queues[client][0]
        return first.priority, self._held_by[client], first.number

    def _give(self, client: str) -> None:
        self.held += 1
        self._held_by[client] += 1

    def _give_up(self, client: str, turn: _Turn) -> None:
        queue = self._queues.get(client, ())
        if turn in queue:
            self._queues[client].remove(turn)
            heapify(self._queues[client])
            self._forget_empty(client)
        elif turn.future.done() and not turn.future.cancelled() and turn.future.exception() is None:
            self.leave(client)  # the place arrived just as the request left

    def _forget_empty(self, client: str) -> None:
        if not self._queues[client]:
            del self._queues[client]


def extra_places(places: int) -> int:
    """The usual number of extra places."""
    return places // 8
