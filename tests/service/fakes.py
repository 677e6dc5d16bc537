"""Fake services without a model on real gRPC servers, and a real coordinator in front of them.

The target counts: n + 1 follows n. The draft counts along, unless a test gives it another rule.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from pydantic import SecretStr

from tandem.clients.client import Client
from tandem.config.settings import ServerSettings
from tandem.errors import (
    CapacityError,
    InvalidRequestError,
    ServiceUnavailableError,
    TandemError,
    status_code,
)
from tandem.model.replica import ReplicaState
from tandem.serving.interceptors import Context, RunningCalls
from tandem.serving.server import new_server
from tandem.serving.streams import AnswerT, OptionsT, ServedSequence, StepT
from tandem.v1 import draft_pb2_grpc, generation_pb2, generation_pb2_grpc, target_pb2_grpc
from tandem_coordinator.service import CoordinatorService
from tandem_coordinator.settings.coordinator import CoordinatorSettings
from tandem_coordinator.telemetry.observer import Observer
from tandem_load.fakes import MAX_LENGTH, Fake, FakeDraft, FakeTarget, counting, scripted
from tests.service.clients import until

__all__ = ["MAX_LENGTH", "Fake", "FakeDraft", "FakeTarget", "counting", "scripted"]

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
HANG_SECONDS = 300.0
"""Bound on a test: a hang ends with TimeoutError."""


def refusal(code: grpc.StatusCode, sentence: str) -> TandemError:
    """Return the error that ends a sequence with this status."""
    meanings = (CapacityError, InvalidRequestError, ServiceUnavailableError)
    errors = (meaning(sentence) for meaning in meanings)
    return next(error for error in errors if status_code(error) is code)


def hooked(
    sequence: ServedSequence[OptionsT, StepT, AnswerT],
    on_step: Callable[[StepT], None] = lambda _: None,
    on_answer: Callable[[AnswerT], AnswerT] = lambda answer: answer,
) -> ServedSequence[OptionsT, StepT, AnswerT]:
    """Pass the steps of a sequence, and its answers and pushes, through these functions."""
    steps = sequence.steps
    say = sequence.say

    async def observed(pushed: Any = None) -> AsyncIterator[StepT]:
        async for step in steps(pushed):
            on_step(step)
            yield step

    errors: list[Exception] = []

    def told(answer: AnswerT) -> None:
        if errors:
            return  # nothing is said after an answer that was lost
        try:
            say(on_answer(answer))
        except Exception as error:  # noqa: BLE001 - it ends the sequence, whoever told the answer
            errors.append(error)
            sequence.tell(error)

    vars(sequence).update(steps=observed, say=told)
    return sequence


class Health(health.aio.HealthServicer):  # type: ignore[misc]  # the published stubs lack it
    """A health servicer that can hang."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.answers.set()

    async def Check(  # noqa: N802 - gRPC looks a method up by the name that it has in the proto
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        await self.answers.wait()
        answer: health_pb2.HealthCheckResponse = await super().Check(request, context)
        return answer


class Served:
    """Servicers of the draft or the target, or a function that registers others, on a port of their own."""

    def __init__(
        self,
        *servicers: object,
        steps: Sequence[Any] = (),
        auth_token: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.host = host
        self.port = port
        self.health = Health()
        self.server: grpc.aio.Server
        self._servicers = servicers
        self._steps = steps
        self._settings = ServerSettings(auth_token=None if auth_token is None else SecretStr(auth_token))

    @property
    def fake(self) -> Any:
        return self._servicers[0]

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    async def start(self, status: int = SERVING) -> None:
        """Start on any port, or again on the same one."""
        self.health = Health()
        self.server = new_server(self._settings, RunningCalls(), *self._steps)
        for servicer in self._servicers:
            if isinstance(servicer, target_pb2_grpc.TargetServiceServicer):
                target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, self.server)
            if isinstance(servicer, draft_pb2_grpc.DraftServiceServicer):
                draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, self.server)
            if callable(servicer):
                servicer(self.server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        await self.say(status)
        self.port = self.server.add_insecure_port(self.address)
        await self.server.start()

    async def say(self, status: int) -> None:
        await self.health.set("", status)

    async def stop(self) -> None:
        await self.server.stop(None)


@asynccontextmanager
async def served(*servicers: object) -> AsyncIterator[list[Served]]:
    """Run each of these servicers on a server of its own."""
    services = [Served(servicer) for servicer in servicers]
    for each in services:
        await each.start()
    try:
        yield services
    finally:
        for each in services:
            await each.stop()


@asynccontextmanager
async def serving(
    *servicers: object, steps: Sequence[Any] = (), auth_token: str | None = None
) -> AsyncIterator[tuple[str, grpc.aio.Server]]:
    """Run a ready server with these servicers; yield its address and the server."""
    one = Served(*servicers, steps=steps, auth_token=auth_token)
    await one.start()
    try:
        yield one.address, one.server
    finally:
        await one.stop()


@asynccontextmanager
async def coordinator(
    settings: CoordinatorSettings, observer: Observer | None = None, auth_token: str | None = None
) -> AsyncIterator[tuple[str, CoordinatorService]]:
    """Run a coordinator with these settings; yield its address and the service."""
    service = CoordinatorService(settings, observer)
    await service.start()
    try:
        async with serving(service.register, steps=service.steps, auth_token=auth_token) as (address, _):
            yield address, service
    finally:
        await service.close()


class GenerateOnly(generation_pb2_grpc.GenerationServiceServicer):
    """Base class of test servicers. The generated type stubs declare every method abstract, so one must define all."""

    async def RenderChat(  # noqa: N802 - gRPC looks a method up by the name that it has in the proto
        self, request: generation_pb2.RenderChatRequest, context: Context
    ) -> generation_pb2.RenderChatResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this servicer renders no chats")

    def GenerateBatch(  # noqa: N802
        self, requests: AsyncIterator[generation_pb2.GenerateBatchRequest], context: Context
    ) -> AsyncIterator[generation_pb2.GenerateBatchResponse]:
        raise NotImplementedError


def paced(step_seconds: float) -> FakeTarget:
    """A counting target whose steps take so long."""
    target = FakeTarget()
    target.step_seconds = step_seconds
    return target


class Fleet(NamedTuple):
    """A coordinator over fakes, a client of it, and the fakes in the order in which they were given."""

    client: Client
    services: list[Served]
    coordinator: CoordinatorService


def addresses(services: Sequence[Served], kind: type[Fake]) -> str:
    return ",".join(each.address for each in services if isinstance(each.fake, kind))


def settings_for(target: str, draft: str | None = None, **options: Any) -> CoordinatorSettings:
    """The settings of a coordinator over these addresses: no draft is late on a busy machine, unless a test says so."""
    usual: dict[str, Any] = {"draft_patience_seconds": 30.0, "speculation_policy": "fixed"}
    return CoordinatorSettings(**(usual | {"target_address": target, "draft_address": draft} | options))


def settings_over(services: Sequence[Served], **options: Any) -> CoordinatorSettings:
    return settings_for(addresses(services, FakeTarget), addresses(services, FakeDraft) or None, **options)


@asynccontextmanager
async def coordinated(
    target: str, draft: str | None = None, **options: Any
) -> AsyncIterator[tuple[Client, CoordinatorService]]:
    """Run a coordinator over services at these addresses; yield a client of it, and the coordinator."""
    running = coordinator(settings_for(target, draft, **options))
    async with running as (address, service), Client(address) as client:
        yield client, service


@asynccontextmanager
async def fleet(*fakes: Fake, **options: Any) -> AsyncIterator[Fleet]:
    """Run a coordinator with these options over any number of fakes, until all of them are known to be ready."""
    async with (
        asyncio.timeout(HANG_SECONDS),
        served(*fakes) as services,
        coordinator(settings_over(services, **options)) as (address, service),
        Client(address) as client,
    ):
        shots = service.replicas.snapshots
        await until(lambda: all(each.state is ReplicaState.READY for each in shots()))
        yield Fleet(client, services, service)


@asynccontextmanager
async def cluster(
    target: FakeTarget, draft: FakeDraft | None = None, **options: Any
) -> AsyncIterator[Client]:
    async with fleet(*([target] if draft is None else [target, draft]), **options) as (client, *_):
        yield client
