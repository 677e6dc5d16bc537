"""Two senders of many requests at once: real real_clients, and one that takes almost no processor time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio

from coordinator.requests.arrival import GENERATE
from tandem.client import Client, Retries
from tandem.errors import CapacityError
from tandem.types import GenerationRequest
from tandem.v1 import generation_pb2
from tandem.wire.generation import chunk_from_proto, request_to_proto
from tandem.wire.status import retry_after_seconds
from tests.service.clients import complete
from tests.service.rush import Answer, rush

REQUEST = GenerationRequest((10,), max_tokens=40, temperature=0.0, num_speculative_tokens=4)


@dataclass(frozen=True)
class Attempt:
    """How a request ended."""

    token_ids: tuple[int, ...] | None
    """None if the request was refused."""
    seconds: float
    retry_after_seconds: float | None = None


async def attempt(client: Client) -> Attempt:
    """Send a request once, and note how it ended and how long that took."""
    began = time.perf_counter()
    try:
        completed = await complete(client, REQUEST)
    except CapacityError as error:
        return Attempt(None, time.perf_counter() - began, error.retry_after_seconds)
    return Attempt(completed.token_ids, time.perf_counter() - began)


Send = Callable[[int], Awaitable[list[Attempt]]]
"""Sends this many requests at once."""


@asynccontextmanager
async def real_clients(address: str) -> AsyncIterator[Send]:
    """Send through real real_clients. Their own processor time is a large part of the times that they measure."""
    async with Client(address, retries=Retries(attempts=1)) as client:

        async def send(count: int) -> list[Attempt]:
            return await asyncio.gather(*(attempt(client) for _ in range(count)))

        yield send


@asynccontextmanager
async def raw_requests(address: str) -> AsyncIterator[Send]:
    """Send raw HTTP/2, so that the measured times leave out the work of the real_clients."""
    message: generation_pb2.GenerateRequest = request_to_proto(REQUEST)
    async with rush(address) as connection:

        async def send(count: int) -> list[Attempt]:
            return [
                as_attempt(one) for one in await connection.ask(GENERATE, message.SerializeToString(), count)
            ]

        yield send


def as_attempt(answer: Answer) -> Attempt:
    """Read an answer as the attempt that it ends."""
    assert answer.seconds is not None
    if answer.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]:
        return Attempt(None, answer.seconds, retry_after_seconds(answer.trailing_metadata))
    assert answer.code == grpc.StatusCode.OK.value[0]
    chunks = [
        chunk_from_proto(generation_pb2.GenerateResponse.FromString(message)) for message in answer.messages
    ]
    return Attempt(tuple(token for chunk in chunks for token in chunk.token_ids), answer.seconds)
