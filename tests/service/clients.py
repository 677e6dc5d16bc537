"""Runs completions, one or many at once, and waits for conditions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from tandem.clients.client import Client, Completed, join_chunks
from tandem.model.types import GenerationRequest

AT_ONCE = 16
"""Default number of requests that run at once."""


async def complete(
    client: Client, request: GenerationRequest, begun: asyncio.Event | None = None
) -> Completed:
    """Read a completion to its end; set the event at the first token that the draft proposed."""
    chunks = []
    async for chunk in client.generate(request):
        chunks.append(chunk)
        if begun is not None and any(chunk.drafted):
            begun.set()
    assert all(chunk.summary is None for chunk in chunks[:-1])
    completed = join_chunks(chunks)
    assert completed.summary.completion_tokens == len(completed.token_ids)
    return completed


async def complete_all(
    address: str, requests: Sequence[GenerationRequest], at_once: int = AT_ONCE
) -> list[Completed]:
    """Complete all requests, at most `at_once` at a time, and return them in order."""
    places = asyncio.Semaphore(at_once)
    async with Client(address) as client:

        async def one(request: GenerationRequest) -> Completed:
            async with places:
                return await complete(client, request)

        return await asyncio.gather(*map(one, requests))


async def until(holds: Callable[[], bool], seconds: float = 60.0, why: Callable[[], str] = str) -> None:
    """Wait until the condition holds; fail if it does not within the time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s\n{why()}"
        await asyncio.sleep(0.01)
