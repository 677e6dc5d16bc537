"""A drain is announced at once and waits only for calls; a second signal ends the process."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.errors import TandemError
from tandem.rpc.channels import open_channel
from tandem.serving.server import serve
from tandem.settings import ServerSettings
from tandem.v1 import generation_pb2, generation_pb2_grpc
from tests.paths import ROOT
from tests.unit.tandem.serving.served import Scripted, health_of, refusal

LONG_SECONDS = 60.0
QUICK_SECONDS = 5.0

STUCK = """
import asyncio, sys
from tandem.rpc.channels import open_channel
from tandem.serving.server import serve
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
