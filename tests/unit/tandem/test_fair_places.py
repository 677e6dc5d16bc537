"""Clients share places fairly, and no place is lost or given twice."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.serving.fair_places import FairPlaces, extra_places

CLIENTS = ("", "192.0.2.1", "192.0.2.2", "192.0.2.3")


class Guests:
    """Requests of clients, each of which stays until it is told to leave."""

    def __init__(self, places: FairPlaces) -> None:
        self.places = places
        self.inside: list[tuple[str, int]] = []
        self.tasks: dict[tuple[str, int], asyncio.Task[None]] = {}

    async def comes(self, client: str) -> tuple[str, int]:
        guest = (client, len(self.tasks))
        self.tasks[guest] = asyncio.create_task(self._enter(guest))
        await settle()
        return guest

    async def leaves(self, guest: tuple[str, int]) -> None:
        self.inside.remove(guest)
        self.places.leave(guest[0])
        await settle()

    @property
    def waiting(self) -> list[tuple[str, int]]:
        return [guest for guest, task in self.tasks.items() if not task.done()]

    async def _enter(self, guest: tuple[str, int]) -> None:
        await self.places.take(guest[0])
        self.inside.append(guest)


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_equal_clients_are_served_in_order_of_arrival() -> None:
    guests = Guests(FairPlaces(1, 0))
    first = await guests.comes("192.0.2.1")
    order = [await guests.comes(client) for client in ("192.0.2.3", "192.0.2.2", "192.0.2.1")]
    for guest in [first, *order]:
        assert guests.inside == [guest]
        await guests.leaves(guest)


async def test_requests_without_a_known_client_are_served_in_order_and_take_no_extra_place() -> None:
    guests = Guests(FairPlaces(2, 1))
    order = [await guests.comes("") for _ in range(4)]
    assert guests.inside == order[:2]
    await guests.leaves(order[0])
    assert guests.inside == order[1:3]


async def test_a_refusal_reaches_all_that_wait_and_leaves_the_places_in_order() -> None:
    places = FairPlaces(1, 0)
    guests = Guests(places)
    inside = await guests.comes("192.0.2.1")
    waiting = [await guests.comes("192.0.2.1") for _ in range(2)]
    places.refuse_waiting(RuntimeError("closing"))
    for guest in waiting:
        with pytest.raises(RuntimeError, match="closing"):
            await guests.tasks[guest]
    await guests.leaves(inside)
    assert (places.held, places.waiting) == (0, 0)


@given(
    st.integers(1, 9),
    st.lists(
        st.tuples(st.sampled_from(("comes", "leaves", "cancelled")), st.integers(0, 10**6)), max_size=60
    ),
)
async def test_no_place_is_lost_withheld_or_given_twice(count: int, moves: list[tuple[str, int]]) -> None:
    extra = extra_places(count)
    places = FairPlaces(count, extra)
    guests = Guests(places)
    for kind, number in moves:
        before = Counter(client for client, _ in guests.inside)
        entered = len(guests.inside)
        waiting = {client for client, _ in guests.waiting}
        if kind == "comes":
            await guests.comes(CLIENTS[number % len(CLIENTS)])
        elif kind == "leaves" and guests.inside:
            leaving = guests.inside[number % len(guests.inside)]
            before[leaving[0]] -= 1
            await guests.leaves(leaving)
            if len(guests.inside) == entered:  # another one came in
                favoured = guests.inside[-1][0]
                rivals = [client for client in waiting if client]
                if sum(before.values()) < count:
                    assert before[favoured] == min(before[client] for client in waiting)
                else:
                    assert favoured in rivals, "an extra place"
        elif kind == "cancelled" and guests.waiting:
            task = guests.tasks[guests.waiting[number % len(guests.waiting)]]
            task.cancel()
            await settle()
        assert places.held == len(guests.inside) <= count + extra
        assert places.waiting == len(guests.waiting)
        assert not any(places.has_room(client) for client, _ in guests.waiting)
    for guest in guests.waiting:
        guests.tasks[guest].cancel()
    for guest in list(guests.inside):
        await guests.leaves(guest)
    assert (places.held, places.waiting) == (0, 0)


async def test_a_place_that_arrives_as_its_request_is_cancelled_goes_to_the_next() -> None:
    places = FairPlaces(1, 0)
    await places.take("192.0.2.1")
    cancelled, waiting = (asyncio.create_task(places.take("192.0.2.1")) for _ in range(2))
    await asyncio.sleep(0)
    places.leave("192.0.2.1")
    cancelled.cancel()
    await waiting
    assert (places.held, places.waiting) == (1, 0)


async def test_the_lowest_priority_goes_first_and_clients_take_turns_within_one() -> None:
    places = FairPlaces(1, 0)
    await places.take("a")
    order: list[tuple[int, str]] = []

    async def wait(client: str, priority: int) -> None:
        await places.take(client, priority)
        order.append((priority, client))

    asked = [("a", 0), ("a", 0), ("b", 0), ("b", 5), ("a", -1), ("c", -1)]
    tasks = [asyncio.create_task(wait(*each)) for each in asked]
    await asyncio.sleep(0)
    given_up = asyncio.create_task(wait("a", -9))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    holder = "a"
    for count in range(1, len(asked) + 1):
        places.leave(holder)
        await asyncio.sleep(0)
        assert len(order) == count
        holder = order[-1][1]
    await asyncio.gather(*tasks)
    assert [priority for priority, _ in order] == [-1, -1, 0, 0, 0, 5]
    assert {client for _, client in order[:2]} == {"a", "c"}
