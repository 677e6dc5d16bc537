"""Stalled clients hold no place, and fewer, larger chunks say the same: the tokens do not depend on the reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import pytest

from tandem.clients.admin_client import AdminClient
from tandem.errors import AbortedError, CapacityError, DeadlineError
from tandem.model.types import Chunk, GenerationRequest
from tandem_coordinator.service import CoordinatorService
from tests.service.clients import until
from tests.service.fakes import Fake, FakeDraft, FakeTarget, cluster, fleet

STALL = 0.2
REQUEST = GenerationRequest((10,), max_tokens=40, temperature=0.0)
EXPECTED = [*range(11, 51)]


@asynccontextmanager
async def over(*fakes: Fake, **options: Any) -> AsyncIterator[CoordinatorService]:
    """Run a coordinator over these fakes that soon treats a stream as stalled."""
    async with fleet(*fakes, **({"stalled_stream_seconds": STALL} | options)) as (_, _, service):
        yield service


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


async def test_an_unread_stream_holds_no_place_and_continues_when_it_is_read() -> None:
    target = FakeTarget()
    draft = FakeDraft()
    async with over(target, draft) as service:
        completions = service.completions
        async with aclosing(completions.complete(REQUEST)) as stream:
            chunks = [await anext(stream), await anext(stream)]
            assert completions.admission.running == 1
            await until(lambda: not (target.running or draft.running or completions.admission.running))
            assert len(completions.requests.list()) == 1
            for _ in range(2):
                chunks.append(await anext(stream))
                await until(lambda: not completions.admission.running)
            chunks += [chunk async for chunk in stream]
        assert tokens_of(chunks) == EXPECTED
        assert (target.running, completions.admission.running) == (0, 0)


async def test_a_stream_that_is_read_keeps_its_places() -> None:
    target = FakeTarget()
    async with over(target) as service:
        async for _ in service.completions.complete(REQUEST):
            await asyncio.sleep(STALL / 8)
        assert target.opened == 1


async def test_unread_streams_do_not_block_others() -> None:
    async with over(FakeTarget(), max_concurrent_requests=2, max_queued_requests=0) as service:
        completions = service.completions
        async with AsyncExitStack() as stack:
            stalled = []
            for _ in range(3):
                for _ in range(2):
                    stream = await stack.enter_async_context(aclosing(completions.complete(REQUEST)))
                    stalled.append((stream, [await anext(stream)]))
                await until(lambda: not completions.admission.running)
            good = [chunk async for chunk in completions.complete(REQUEST)]
            assert tokens_of(good) == EXPECTED

            async def rest(stream: Any, chunks: list[Chunk]) -> list[int]:
                return tokens_of([*chunks, *[chunk async for chunk in stream]])

            # Read all of them at once: they wait for each other's places, and none is refused midway.
            assert await asyncio.gather(*(rest(*each) for each in stalled)) == [EXPECTED] * 6
        assert completions.admission.running == 0


@pytest.mark.parametrize(
    ("ending", "error"),
    [("abort", AbortedError), ("deadline", DeadlineError), ("cancel", asyncio.CancelledError)],
)
async def test_a_stream_that_waits_for_its_place_again_can_be_cancelled(
    ending: str, error: type[BaseException]
) -> None:
    async with over(FakeTarget(), max_concurrent_requests=1) as service:
        completions = service.completions
        async with aclosing(completions.complete(REQUEST, 2.0 if ending == "deadline" else None)) as stream:
            await anext(stream)
            await until(lambda: not completions.admission.running)
            async with completions.admission.place(None):

                async def read() -> None:
                    async for _ in stream:
                        pass

                reading = asyncio.create_task(read())
                await until(lambda: completions.admission.places.waiting == 1)
                if ending == "abort":
                    completions.requests.list()[0].abort()
                if ending == "cancel":
                    reading.cancel()
                with pytest.raises(error):
                    await reading
        assert (completions.admission.running, completions.admission.queued) == (0, 0)


async def test_streams_of_one_address_are_bounded() -> None:
    async with over(FakeTarget(), max_streams_per_peer=2) as service:
        complete = service.completions.complete
        async with AsyncExitStack() as stack:
            for _ in range(2):
                stream = await stack.enter_async_context(aclosing(complete(REQUEST, peer="192.0.2.1")))
                await anext(stream)
            await until(lambda: not service.completions.admission.running)
            with pytest.raises(CapacityError, match=r"2 requests from 192\.0\.2\.1 run, wait"):
                await anext(complete(REQUEST, peer="192.0.2.1"))
            assert tokens_of([chunk async for chunk in complete(REQUEST, peer="192.0.2.2")]) == EXPECTED
        assert tokens_of([chunk async for chunk in complete(REQUEST, peer="192.0.2.1")]) == EXPECTED


async def test_grpc_gets_fewer_chunks_once_that_is_configured() -> None:
    """The target makes one token in a round."""
    async with cluster(FakeTarget()) as client, AdminClient(client.address) as admin:
        await admin.update_config({"stream_interval": "16"})
        chunks = [chunk async for chunk in client.generate(REQUEST)]
    assert [len(chunk.token_ids) for chunk in chunks] == [1, 16, 16, 7]
    assert tokens_of(chunks) == EXPECTED
