"""Places that clients share fairly: one that asks for hundreds of them delays no other."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from itertools import count

_Turn = tuple[int, "asyncio.Future[None]"]
"""Number in order of arrival, and what the request waits for."""


class FairPlaces:
    """A free place goes to the client that holds the fewest, and among equals in order of arrival (max-min fairness).

    Extra places are kept for clients that hold few, so that they need not wait until another leaves, as PostgreSQL
    keeps connections for administrators (`superuser_reserved_connections`). A request whose client is not known counts
    as one of a client with many. Belongs to one event loop.
    """

    def __init__(self, places: int, extra: int) -> None:
        self.held = 0
        self._places, self._extra = places, extra
        self._held_by: Counter[str] = Counter()
        self._queues: dict[str, deque[_Turn]] = {}
        self._arrivals = count()

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def has_room(self, client: str) -> bool:
        """True if the client would get a place at once. Whoever waits already cannot have it."""
        # Those with few places may have one of the extra places
        holds_few = client != "" and self._held_by[client] < 4
        return self.held < self._places + (self._extra if holds_few else 0)

    async def take(self, client: str) -> None:
        """Wait for a place, which must be given back by `leave`. An empty client is one that is not known."""
        if self.has_room(client):
            self._give(client)
            return
        turn: _Turn = next(self._arrivals), asyncio.get_running_loop().create_future()
        self._queues.setdefault(client, deque()).append(turn)
        try:
            await turn[1]
        except BaseException:
            self._give_up(client, turn)
            raise

    def leave(self, client: str) -> None:
        self.held -= 1
        self._held_by[client] -= 1
        if not self._held_by[client]:
            del self._held_by[client]
        while able := [each for each in self._queues if self.has_room(each)]:
            favoured = min(able, key=lambda each: (self._held_by[each], self._queues[each][0][0]))
            _, future = self._queues[favoured].popleft()
            self._forget_empty(favoured)
            if not future.done():
                self._give(favoured)
                future.set_result(None)

    def refuse_waiting(self, error: Exception) -> None:
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            for _, future in queue:
                if not future.done():
                    future.set_exception(error)

    def _give(self, client: str) -> None:
        self.held += 1
        self._held_by[client] += 1

    def _give_up(self, client: str, turn: _Turn) -> None:
        queue = self._queues.get(client, ())
        if turn in queue:
            self._queues[client].remove(turn)
            self._forget_empty(client)
        elif turn[1].done() and not turn[1].cancelled() and turn[1].exception() is None:
            self.leave(client)  # the place arrived just as the request left

    def _forget_empty(self, client: str) -> None:
        if not self._queues[client]:
            del self._queues[client]


def extra_places(places: int) -> int:
    """The usual number of extra places."""
    return places // 8
