"""Fake services that drain, hang, stop and start again on their port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.speculation.ahead import DraftAhead
from tandem.client import Client
from tandem.replica import ReplicaState
from tandem.serving.interceptors import Context
from tandem.v1 import draft_pb2_grpc, target_pb2_grpc
from tests.service.clients import until
from tests.service.fakes import Fake, FakeDraft, FakeTarget, coordinator

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Health(health.aio.HealthServicer):  # type: ignore[misc]  # the published stubs lack it
    """A health servicer that can hang."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.answers.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        await self.answers.wait()
        answer: health_pb2.HealthCheckResponse = await super().Check(request, context)
        return answer


class Served:
    """A fake service that can be stopped and started again on its port."""

    def __init__(self, fake: Fake) -> None:
        self.fake = fake
        self.port = 0
        self.health = Health()
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self, status: int = SERVING) -> None:
        self.health = Health()
        self._server = grpc.aio.server()
        if isinstance(self.fake, FakeTarget):
            target_pb2_grpc.add_TargetServiceServicer_to_server(self.fake, self._server)
        if isinstance(self.fake, FakeDraft):
            draft_pb2_grpc.add_DraftServiceServicer_to_server(self.fake, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        await self.say(status)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def say(self, status: int) -> None:
        await self.health.set("", status)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None


@asynccontextmanager
async def served(*fakes: Fake) -> AsyncIterator[list[Served]]:
    services = [Served(fake) for fake in fakes]
    for each in services:
        await each.start()
    try:
        yield services
    finally:
        for each in services:
            await each.stop()


def addresses(services: Sequence[Served], kind: type[Fake]) -> str:
    return ",".join(each.address for each in services if isinstance(each.fake, kind))


@asynccontextmanager
async def fleet(
    *fakes: Fake, patience_seconds: float | None = 30.0, is_adaptive: bool = False, ahead: DraftAhead = "auto"
) -> AsyncIterator[tuple[Client, list[Served]]]:
    """Run a coordinator over any number of these fakes; yield a client and the services."""
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(served(*fakes))
        settings = CoordinatorSettings(
            target_address=addresses(services, FakeTarget),
            draft_address=addresses(services, FakeDraft) or None,
            draft_patience_seconds=patience_seconds,
            speculation_policy="adaptive" if is_adaptive else "fixed",
            draft_ahead=ahead,
        )
        address, service = await stack.enter_async_context(coordinator(settings))
        await until(
            lambda: all(each.state is ReplicaState.READY for each in service.replicas.snapshots()), 20.0
        )
        yield await stack.enter_async_context(Client(address)), services
