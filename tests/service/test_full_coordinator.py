"""A full coordinator refuses a request before it reads it, counts it, and checks the token first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from coordinator.requests.arrival import GENERATE
from coordinator.service import CoordinatorService
from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.telemetry.observer import Observer, RequestObserver
from tandem.client import Client
from tandem.errors import CapacityError
from tandem.rpc.credentials import Credentials
from tandem.types import GenerationRequest
from tandem.wire.status import retry_after_seconds
from tests.service.clients import complete, until
from tests.service.fakes import FakeTarget, serving

REQUEST = GenerationRequest((10,), max_tokens=5, temperature=0.0)
TOKEN = "sesame-open-yourself"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECONDS = 10.0


@dataclass
class Counter(Observer, RequestObserver):
    """Records requests and their outcomes."""

    begun: list[str] = field(default_factory=list)
    """The trace context of each."""
    outcomes: list[BaseException | None] = field(default_factory=list)

    def begin(self, request_id: str, traceparent: str = "") -> Counter:
        self.begun.append(traceparent)
        return self

    def finished(self, error: BaseException | None) -> None:
        self.outcomes.append(error)


@dataclass(frozen=True)
class Full:
    """A coordinator whose only place is taken."""

    address: str
    target: FakeTarget
    counter: Counter
    runs: asyncio.Task[object]
    """The request that takes the place."""


@asynccontextmanager
async def full() -> AsyncIterator[Full]:
    target, counter = FakeTarget(), Counter()
    target.step_seconds = 2 * SECONDS
    async with AsyncExitStack() as stack:
        target_address, _ = await stack.enter_async_context(serving(target))
        settings = CoordinatorSettings(
            target_address=target_address, max_concurrent_requests=1, max_queued_requests=0
        )
        service = CoordinatorService(settings, counter)
        await service.start()
        stack.push_async_callback(service.close)
        address, _ = await stack.enter_async_context(
            serving(service.register, steps=service.steps, auth_token=TOKEN)
        )
        client = await stack.enter_async_context(Client(address, Credentials(token=TOKEN)))
        runs = asyncio.create_task(complete(client, REQUEST))
        await until(lambda: service.completions.admission.is_full)
        yield Full(address, target, counter, runs)
        runs.cancel()
        await asyncio.gather(runs, return_exceptions=True)


@asynccontextmanager
async def unsent(
    address: str, *metadata: tuple[str, str]
) -> AsyncIterator[grpc.aio.StreamStreamCall[Any, Any]]:
    """Start a request whose message is never sent."""
    async with grpc.aio.insecure_channel(address) as channel:
        method: Any = channel.stream_stream(GENERATE)
        yield method(metadata=metadata, timeout=SECONDS)


async def test_a_request_is_refused_unread() -> None:
    bearer = ("authorization", f"Bearer {TOKEN}")
    async with full() as coordinator, unsent(coordinator.address, bearer, ("traceparent", TRACE)) as call:
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await call.details() == "1 request runs and 0 wait, which is the most; try again later"
        assert (retry_after_seconds(await call.trailing_metadata()) or 0.0) > 0.0
        assert coordinator.counter.begun == ["", TRACE]
        (error,) = coordinator.counter.outcomes
        assert isinstance(error, CapacityError)


async def test_without_the_token_the_load_stays_secret() -> None:
    async with full() as coordinator, unsent(coordinator.address) as call:
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert len(coordinator.counter.begun) == 1
