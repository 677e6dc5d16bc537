"""Sends requests to a server as they arrive, and notes when what comes back comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from benchmarks.load.arrivals import Arrival
from benchmarks.load.clients.connection import Connect, Connection, LoadRequest
from benchmarks.load.figures import Served
from tandem.errors import TandemError

_FIRST_ID, _IDS = 300, 1000
"""Lower ids are special tokens and single bytes."""


async def send(
    connect: Connect,
    arrivals: Sequence[Arrival],
    clients: int,
    temperature: float,
    *,
    is_paced: bool,
) -> list[Served]:
    """Send all requests, each at its arrival or when a client is free, and read the answers to their ends.

    Args:
        connect: Makes a client's connection.
        arrivals: What to send.
        clients: Connections, each with at most one request at once.
        temperature: Of every request.
        is_paced: Whether a request's latencies begin at its arrival, even if it waits for a free client; else when
            it is sent.
    """
    began = time.perf_counter()
    places: asyncio.Queue[Connection] = asyncio.Queue()
    async with AsyncExitStack() as stack:
        for _ in range(clients):
            places.put_nowait(await stack.enter_async_context(connect()))

        async def serve(number: int, arrival: Arrival) -> Served:
            await asyncio.sleep(max(0.0, began + arrival.seconds - time.perf_counter()))
            connection = await places.get()
            try:
                arrived = began + arrival.seconds if is_paced else time.perf_counter()
                return await _complete(connection, number, arrival, arrived, temperature)
            finally:
                places.put_nowait(connection)

        return list(await asyncio.gather(*(serve(*each) for each in enumerate(arrivals))))


async def _complete(
    connection: Connection, number: int, arrival: Arrival, arrived: float, temperature: float
) -> Served:
    served = Served(arrived, arrival.prompt_tokens)
    # Prompts differ in their first token, so that no replica finds one of them in its cache.
    prompt = tuple(_FIRST_ID + (number + place) % _IDS for place in range(arrival.prompt_tokens))
    try:
        await connection.complete(LoadRequest(prompt, arrival.output_tokens, temperature), served)
    except TandemError as error:
        served.error, served.reason = type(error).__name__, str(error)
    served.ended = time.perf_counter()
    return served
