"""The life of a server: health before it is ready, refusals while it drains, and no internals in errors."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tandem.errors import CapacityError, ConfigurationError, InvalidRequestError, TandemError
from tandem.serving.interceptors.handlers import Context
from tandem.serving.server import serve
from tandem.settings import ServerSettings
from tandem.v1 import generation_pb2, generation_pb2_grpc
from tests.generate_only import GenerateOnly

SERVICE_NAME = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
Answer = Callable[[], AsyncIterator[generation_pb2.GenerateResponse]]


class Servicer(GenerateOnly):
    answer: Answer

    async def Generate(  # noqa: N802 - the protocol's name
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        async for response in self.answer():
            yield response


@dataclass
class FakeService:
    """Serves one scripted method; starting takes as long as the test wants."""

    name: str = "fake"
    full_names: tuple[str, ...] = (SERVICE_NAME,)
    may_start: asyncio.Event = field(default_factory=asyncio.Event)
    start_error: TandemError | None = None
    is_closed: bool = False
    servicer: Servicer = field(default_factory=Servicer)

    def __post_init__(self) -> None:
        self.request_drain: Callable[[], None] = asyncio.Event().set

    def register(self, server: grpc.aio.Server) -> None:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self.servicer, server)

    async def start(self) -> None:
        await self.may_start.wait()
        if self.start_error is not None:
            raise self.start_error

    async def close(self) -> None:
        self.is_closed = True


@dataclass
class Running:
    """A server in the test's own loop, and a channel to it."""

    task: asyncio.Task[bool]
    address: str
    channel: grpc.aio.Channel

    async def health(self, service: str = "") -> str:
        answer = await health_pb2_grpc.HealthStub(self.channel).Check(
            health_pb2.HealthCheckRequest(service=service)
        )
        name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        return name

    async def generate(self) -> list[str]:
        call = generation_pb2_grpc.GenerationServiceStub(self.channel).Generate(
            generation_pb2.GenerateRequest()
        )
        return [response.text async for response in call]

    async def refusal(self) -> tuple[grpc.StatusCode, str | None]:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await self.generate()
        return error.value.code(), error.value.details()


async def start(service: FakeService, capsys: pytest.CaptureFixture[str], **settings: object) -> Running:
    task = asyncio.create_task(serve(ServerSettings.model_validate(settings), service))
    output = ""
    while "listening on" not in output:
        await asyncio.sleep(0.01)
        output += capsys.readouterr().out
    address = output.partition("listening on ")[2].split()[0]
    return Running(task, address, grpc.aio.insecure_channel(address))


async def until_serving(running: Running) -> None:
    watch = health_pb2_grpc.HealthStub(running.channel).Watch(health_pb2.HealthCheckRequest())
    async for answer in watch:
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            break
    watch.cancel()


async def stop(running: Running) -> bool:
    os.kill(os.getpid(), signal.SIGTERM)
    was_ready = await running.task
    await running.channel.close()
    return was_ready


async def says(*texts: str) -> AsyncIterator[generation_pb2.GenerateResponse]:
    for text in texts:
        yield generation_pb2.GenerateResponse(text=text)


async def raises(error: Exception) -> AsyncIterator[generation_pb2.GenerateResponse]:
    yield generation_pb2.GenerateResponse(text="a")
    raise error


async def test_it_refuses_until_it_is_ready_then_answers(capsys: pytest.CaptureFixture[str]) -> None:
    service = FakeService()
    service.servicer.answer = lambda: says("a", "b")
    running = await start(service, capsys)
    assert await running.health() == "NOT_SERVING"
    assert await running.health(SERVICE_NAME) == "NOT_SERVING"
    assert await running.refusal() == (grpc.StatusCode.UNAVAILABLE, "the fake service is still starting")
    service.may_start.set()
    await until_serving(running)
    assert await running.health(SERVICE_NAME) == "SERVING"
    assert await running.generate() == ["a", "b"]
    assert await stop(running)
    assert service.is_closed


async def test_reflection_lists_the_services(capsys: pytest.CaptureFixture[str]) -> None:
    service = FakeService()
    running = await start(service, capsys)
    # The published stubs know only the synchronous channel.
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(running.channel)  # type: ignore[arg-type]
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    answers = [answer async for answer in call]
    names = {entry.name for entry in answers[0].list_services_response.service}
    assert {SERVICE_NAME, "grpc.health.v1.Health"} <= names
    assert not await stop(running), "it never was ready"


async def test_running_calls_finish_while_it_drains_and_new_ones_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    service = FakeService()
    service.may_start.set()
    goes_on = asyncio.Event()

    async def slow() -> AsyncIterator[generation_pb2.GenerateResponse]:
        yield generation_pb2.GenerateResponse(text="a")
        await goes_on.wait()
        yield generation_pb2.GenerateResponse(text="b")

    service.servicer.answer = slow
    running = await start(service, capsys)
    await until_serving(running)
    call = generation_pb2_grpc.GenerationServiceStub(running.channel).Generate(
        generation_pb2.GenerateRequest()
    )
    first = await call.read()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.2)
    code, _ = await running.refusal()
    assert code is grpc.StatusCode.UNAVAILABLE
    goes_on.set()
    second = await call.read()
    assert isinstance(first, generation_pb2.GenerateResponse)
    assert isinstance(second, generation_pb2.GenerateResponse)
    assert (first.text, second.text) == ("a", "b")
    assert await running.task
    await running.channel.close()


async def test_a_call_that_outlives_the_drain_is_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    service = FakeService()
    service.may_start.set()

    async def endless() -> AsyncIterator[generation_pb2.GenerateResponse]:
        yield generation_pb2.GenerateResponse(text="a")
        await asyncio.Event().wait()

    service.servicer.answer = endless
    running = await start(service, capsys, drain_timeout_seconds=0.1)
    await until_serving(running)
    call = generation_pb2_grpc.GenerationServiceStub(running.channel).Generate(
        generation_pb2.GenerateRequest()
    )
    await call.read()
    assert await stop(running)
    assert service.is_closed


@pytest.mark.parametrize(
    ("error", "code", "details"),
    [
        (
            InvalidRequestError("max_tokens is 0; it must be at least 1"),
            grpc.StatusCode.INVALID_ARGUMENT,
            "max_tokens",
        ),
        (CapacityError("no room"), grpc.StatusCode.RESOURCE_EXHAUSTED, "no room"),
        (TandemError("odd"), grpc.StatusCode.INTERNAL, "odd"),
        (ZeroDivisionError("secret"), grpc.StatusCode.INTERNAL, "internal error"),
    ],
)
async def test_errors_become_status_codes_and_internals_stay_inside(
    error: Exception, code: grpc.StatusCode, details: str, capsys: pytest.CaptureFixture[str]
) -> None:
    service = FakeService()
    service.may_start.set()
    service.servicer.answer = lambda: raises(error)
    running = await start(service, capsys)
    await until_serving(running)
    seen_code, seen_details = await running.refusal()
    assert seen_code is code
    assert seen_details is not None
    assert details in seen_details
    assert "secret" not in seen_details
    assert await stop(running)


async def test_a_port_in_use_is_reported_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    service = FakeService()
    running = await start(service, capsys)
    port = int(running.address.rpartition(":")[2])
    with pytest.raises(
        ConfigurationError, match=rf"cannot listen on 127.0.0.1:{port}: address already in use"
    ):
        await serve(ServerSettings(port=port), FakeService())
    await stop(running)


async def test_an_error_at_startup_ends_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    service = FakeService(start_error=ConfigurationError("no such model"))
    service.may_start.set()
    with pytest.raises(ConfigurationError, match="no such model"):
        await serve(ServerSettings(), service)
    assert service.is_closed
    capsys.readouterr()
