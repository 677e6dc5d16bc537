"""An administrator aborts a request: its client gets the reason, and every service frees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import pytest

from coordinator.service import CoordinatorService
from coordinator.settings.coordinator import CoordinatorSettings
from tandem.client import Client
from tandem.errors import AbortedError
from tandem.types import GenerationRequest
from tandem.v1 import draft_pb2_grpc, target_pb2_grpc
from tests.service.clients import complete, until
from tests.service.fakes import FakeDraft, FakeTarget, serving

REQUEST = GenerationRequest((10,), max_tokens=40, temperature=0.0, num_speculative_tokens=2, seed=1)


@asynccontextmanager
async def coordinator(target: FakeTarget, draft: FakeDraft) -> AsyncIterator[CoordinatorService]:
    """Run a coordinator over these fakes; yield its service."""
    async with AsyncExitStack() as stack:
        target_address, _ = await stack.enter_async_context(
            serving(lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(target, server))
        )
        draft_address, _ = await stack.enter_async_context(
            serving(lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, server))
        )
        service = CoordinatorService(
            CoordinatorSettings(
                target_address=target_address, draft_address=draft_address, draft_patience_seconds=30.0
            )
        )
        await service.start()
        stack.push_async_callback(service.close)
        yield service


async def test_an_abort_during_a_step_reaches_the_client_at_once() -> None:
    target, draft = FakeTarget(), FakeDraft()
    async with coordinator(target, draft) as service, serving(service.register) as (address, _):
        requests = service.completions.requests
        async with Client(address) as client:
            work = asyncio.create_task(complete(client, REQUEST))
            target.step_seconds = 0.05
            await until(lambda: any(request.completion_tokens > 3 for request in requests.list()), 10)
            (active,) = requests.list()
            target.step_seconds = 30.0  # the next answer would take half a minute
            await until(lambda: active.completion_tokens > 3, 10)
            active.abort("making room")
            tokens = active.completion_tokens
            with pytest.raises(AbortedError, match=f"ended the request after {tokens} tokens: making room"):
                await asyncio.wait_for(work, 5)
        await until(lambda: not requests.list() and target.running == draft.running == 0, 5)
        assert (requests.outcomes.aborted, requests.outcomes.completed) == (1, 0)
        target.step_seconds = 0.0
        async with Client(address) as client:
            assert (await complete(client, REQUEST)).token_ids == tuple(range(11, 51))
        assert (requests.outcomes.aborted, requests.outcomes.completed) == (1, 1)
        assert target.finished == 1


async def test_an_abort_frees_the_services_while_the_client_does_not_read() -> None:
    """The generator is suspended at a yield, where there is no task to cancel."""
    target, draft = FakeTarget(), FakeDraft()
    async with coordinator(target, draft) as service:
        requests = service.completions.requests
        async with aclosing(service.completions.complete(REQUEST)) as chunks:
            await anext(chunks)
            await anext(chunks)
            (active,) = requests.list()
            active.abort()
            active.abort("a second time does nothing")
            await until(lambda: target.running == draft.running == 0, 5)
            with pytest.raises(AbortedError, match=r"after 4 tokens$"):
                await anext(chunks)
        assert requests.list() == []
        assert requests.outcomes.aborted == 1


async def test_a_disconnecting_client_is_not_an_abort() -> None:
    target, draft = FakeTarget(), FakeDraft()
    async with coordinator(target, draft) as service, serving(service.register) as (address, _):
        requests = service.completions.requests
        target.step_seconds = 0.05
        async with Client(address) as client:
            async with aclosing(client.generate(REQUEST)) as chunks:
                await anext(chunks)
            await until(lambda: requests.outcomes.cancelled == 1, 5)
        assert requests.outcomes.aborted == 0


async def test_a_cancelled_task_stays_cancelled() -> None:
    target, draft = FakeTarget(), FakeDraft()
    async with coordinator(target, draft) as service:
        requests = service.completions.requests

        async def read() -> None:
            async with aclosing(service.completions.complete(REQUEST)) as chunks:
                async for _ in chunks:
                    pass

        target.step_seconds = 30.0
        task = asyncio.create_task(read())
        await until(lambda: target.running == 1, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert requests.outcomes.cancelled == 1


async def test_tokens_are_counted_as_they_arrive() -> None:
    target, draft = FakeTarget(), FakeDraft()
    async with coordinator(target, draft) as service:
        requests = service.completions.requests
        async with aclosing(service.completions.complete(REQUEST)) as chunks:
            async for _ in chunks:
                assert requests.tokens.total == sum(r.completion_tokens for r in requests.list())
        assert requests.tokens.total == 40
