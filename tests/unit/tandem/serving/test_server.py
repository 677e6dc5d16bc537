"""A stuck service reports NOT_SERVING and refuses new calls until it continues."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tandem.errors import CapacityError, ConfigurationError, InvalidRequestError, TandemError
from tandem.rpc.channels import open_channel
from tandem.serving.interceptors import Context
from tandem.serving.server import Service, serve
from tandem.settings import ServerSettings
from tandem.v1 import generation_pb2, generation_pb2_grpc
from tests.generate_only import GenerateOnly
from tests.paths import ROOT
from tests.unit.tandem.serving.served import Scripted, health_of, refusal, running, texts_from


class Stalling(Scripted):
    overdue_seconds = 0.0


async def wait_for_health(address: str, health: str) -> None:
    async with asyncio.timeout(30.0):
        while await health_of(address) != health:  # noqa: ASYNC110 - asked over the network
            await asyncio.sleep(0.05)


async def test_a_stuck_service_is_not_serving_until_it_continues(capsys: pytest.CaptureFixture[str]) -> None:
    service = Stalling()
    async with running(service, capsys) as address:
        await wait_for_health(address, "SERVING")
        service.overdue_seconds = 42.0
        await wait_for_health(address, "NOT_SERVING")
        error = await refusal(address)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "stuck in a step for 42 s" in (error.details() or "")
        service.overdue_seconds = 0.0
        await wait_for_health(address, "SERVING")
        assert await texts_from(address) == ["hello"]


async def test_a_stuck_service_still_drains(capsys: pytest.CaptureFixture[str]) -> None:
    service = Stalling()
    async with running(service, capsys) as address:
        service.overdue_seconds = 42.0
        await wait_for_health(address, "NOT_SERVING")
    # `running` has drained the server, and asserted that it ended.
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await health_of(address)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


LONG_SECONDS = 60.0
QUICK_SECONDS = 5.0

STUCK = """
import asyncio, sys
from tandem.rpc.channels import open_channel
from tandem.serving.server import Service, serve
from tandem.settings import ServerSettings
from tests.unit.tandem.serving.served import Scripted, texts_from

async def forever():
    await asyncio.Event().wait()
    yield

async def main():
    port = int(sys.argv[1])
    server = asyncio.create_task(serve(ServerSettings(port=port, drain_timeout_seconds=60), Scripted(forever)))
    await asyncio.sleep(0.5)
    asyncio.create_task(texts_from(f"127.0.0.1:{port}"))
    await asyncio.sleep(0.5)
    print("stuck", flush=True)
    await server

asyncio.run(main())
"""


class Slow:
    """Sends a message, waits to be released, and sends another."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.may_go_on = asyncio.Event()

    async def __call__(self) -> AsyncIterator[generation_pb2.GenerateResponse]:
        yield generation_pb2.GenerateResponse(text="a")
        self.begun.set()
        await self.may_go_on.wait()
        yield generation_pb2.GenerateResponse(text="b")


async def test_a_drain_is_announced_to_all_and_waits_for_calls_but_not_for_watchers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    slow = Slow()
    service = Scripted(slow)
    server = asyncio.create_task(serve(ServerSettings(drain_timeout_seconds=LONG_SECONDS), service))
    output = ""
    while "ready on" not in output:
        await asyncio.sleep(0.01)
        output += capsys.readouterr().out
    address = output.partition("ready on ")[2].split()[0]
    async with open_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(generation_pb2.GenerateRequest())
        await slow.begun.wait()
        service.request_drain()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await health_of(address) == "NOT_SERVING", "who connects now is told as well"
        error = await refusal(address)
        assert (error.code(), error.details()) == (
            grpc.StatusCode.UNAVAILABLE,
            "the fake service is draining",
        )
        assert not server.done()
        slow.may_go_on.set()
        began = time.monotonic()
        assert [response.text async for response in call] == ["a", "b"]
        assert await server
        assert time.monotonic() - began < QUICK_SECONDS, "the watcher was not waited for"


async def test_calls_that_outlast_the_drain_get_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    service = Scripted(slow := Slow())
    server = asyncio.create_task(serve(ServerSettings(drain_timeout_seconds=0.1), service))
    output = ""
    while "ready on" not in output:
        await asyncio.sleep(0.01)
        output += capsys.readouterr().out
    async with open_channel(output.partition("ready on ")[2].split()[0]) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(generation_pb2.GenerateRequest())
        await slow.begun.wait()
        await call.read()
        service.request_drain()
        async with asyncio.timeout(QUICK_SECONDS):
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert await call.details() == "the fake service has drained for as long as it may, and stops"
        assert await server
    assert service.ended == 1


@pytest.mark.slow
async def test_a_second_signal_ends_the_process_at_once(unused_port: int) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STUCK, str(unused_port), cwd=ROOT, stdout=-1, stderr=-1
    )
    try:
        assert process.stdout is not None
        async for line in process.stdout:
            if line == b"stuck\n":
                break
        process.send_signal(signal.SIGTERM)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.wait(), 1.0)
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), QUICK_SECONDS) == 128 + signal.SIGINT
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


class Broken(Scripted):
    """Finds out, once it serves, that it cannot go on."""

    failure = ""

    async def start(self) -> None:
        self.failure = "the engine has failed"
        self.request_drain()


async def test_a_service_that_cannot_go_on_ends_with_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TandemError, match="the engine has failed"):
        await asyncio.wait_for(serve(ServerSettings(port=0), Broken()), QUICK_SECONDS)
    assert "listening on" in capsys.readouterr().out


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
class FakeService(Service):
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
