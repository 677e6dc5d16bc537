"""A server's life: it refuses until it is ready, says so to health checks, drains, and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tandem.config.settings import ServerSettings
from tandem.errors import CapacityError, ConfigurationError, InvalidRequestError, TandemError
from tandem.rpc.channels import open_channel
from tandem.serving.healthcheck import Health, check, credentials_of
from tandem.serving.interceptors import RunningCalls
from tandem.serving.server import YOUNG_OBJECTS, Readiness, serve
from tandem.v1 import generation_pb2, generation_pb2_grpc
from tests.certificates import issued
from tests.end_to_end.processes import run
from tests.unit.tandem.serving.served import Scripted, announced, health_of, refusal, running, texts_from


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


async def test_a_watcher_of_health_that_does_not_read_holds_up_no_drain() -> None:
    readiness = Readiness("fake", (), calls := RunningCalls())
    # The library holds this lock while it writes to a watcher.
    async with asyncio.timeout(30.0), readiness.health._server_watchers[""]:
        await readiness.close()
    assert calls.closed_because


QUICK_SECONDS = 30.0


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
    server = asyncio.create_task(serve(ServerSettings(drain_timeout_seconds=60.0), service))
    address = await announced(capsys, "ready on ")
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
        assert [response.text async for response in call] == ["a", "b"]
        # The watcher is not waited for: the drain would take longer than this.
        await asyncio.wait_for(server, QUICK_SECONDS)


FROZEN = """
import gc
from tandem.serving.server import main
from tandem.config.settings import ServerSettings
from tests.unit.tandem.serving.served import Scripted

class Fake(Scripted):
    def __init__(self, settings):
        super().__init__()

    async def start(self):
        self.request_drain()

    async def close(self):
        print("frozen", gc.get_freeze_count() > 50_000, gc.get_threshold()[0])

main(ServerSettings, Fake, "fake", ["--port", "0"])
"""


def test_objects_from_startup_are_not_collected_again() -> None:
    ended = run(sys.executable, "-c", FROZEN)
    assert f"frozen True {YOUNG_OBJECTS}" in ended.stdout, ended.stderr


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


class Slowly(Scripted):
    """Starts when the test lets it, perhaps with an error."""

    def __init__(self, error: TandemError | None = None) -> None:
        super().__init__()
        self.may_start = asyncio.Event()
        self.is_closed = False
        self._error = error

    async def start(self) -> None:
        if self._error is not None:
            raise self._error
        await self.may_start.wait()

    async def close(self) -> None:
        self.is_closed = True


async def test_it_refuses_until_it_is_ready_then_answers(capsys: pytest.CaptureFixture[str]) -> None:
    service = Slowly()
    server = asyncio.create_task(serve(ServerSettings(), service))
    address = await announced(capsys, "listening on ")
    assert await health_of(address) == "NOT_SERVING"
    assert (await refusal(address)).details() == "the fake service is still starting"
    with pytest.raises(ConfigurationError, match="address already in use"):
        await serve(ServerSettings(port=int(address.rpartition(":")[2])), Slowly())
    service.may_start.set()
    await wait_for_health(address, "SERVING")
    assert await texts_from(address) == ["hello"]
    os.kill(os.getpid(), signal.SIGTERM)
    await server
    assert service.is_closed


async def test_it_answers_on_a_unix_socket_and_takes_the_place_of_one_that_was_left_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "service"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    server = asyncio.create_task(serve(ServerSettings(host=f"unix:{path}"), Scripted()))
    assert await announced(capsys, "ready on ") == f"unix:{path}"
    assert await texts_from(f"unix:{path}") == ["hello"]
    with pytest.raises(ConfigurationError, match="address already in use; choose another socket with --host"):
        await serve(ServerSettings(host=f"unix:{path}"), Scripted())
    assert await texts_from(f"unix:{path}") == ["hello"]
    os.kill(os.getpid(), signal.SIGTERM)
    await server


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("file", "address already in use; choose another socket with --host"),
        ("missing/service", "no such file or directory; choose another socket with --host"),
        ("x" * 108, "bytes; it must have at most 107"),
    ],
)
async def test_a_unix_socket_that_cannot_be_made_is_refused_in_a_sentence(
    name: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigurationError) as refused:
        await serve(ServerSettings(host=f"unix:{tmp_path / name}"), Scripted())
    assert str(refused.value).startswith(f"cannot listen on unix:{tmp_path / name}: ")
    assert str(refused.value).endswith(reason)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("error", "code", "details"),
    [
        (InvalidRequestError("max_tokens is 0"), grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
        (CapacityError("no room"), grpc.StatusCode.RESOURCE_EXHAUSTED, "no room"),
        (TandemError("odd"), grpc.StatusCode.INTERNAL, "odd"),
        (ZeroDivisionError("secret"), grpc.StatusCode.INTERNAL, "internal error"),
    ],
)
async def test_errors_become_status_codes_and_internals_stay_inside(
    error: Exception, code: grpc.StatusCode, details: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def raises() -> AsyncIterator[generation_pb2.GenerateResponse]:
        yield generation_pb2.GenerateResponse(text="a")
        raise error

    async with running(Scripted(raises), capsys) as address:
        seen = await refusal(address)
    assert seen.code() is code
    assert details in (seen.details() or "")
    assert "secret" not in (seen.details() or "")


async def test_an_error_at_startup_ends_the_server() -> None:
    service = Slowly(ConfigurationError("no such model"))
    with pytest.raises(ConfigurationError, match="no such model"):
        await serve(ServerSettings(), service)
    assert service.is_closed


@contextmanager
def health_server(status: int, credentials: grpc.ServerCredentials | None = None) -> Iterator[str]:
    """The address of a server that says this of its health."""
    servicer = health.HealthServicer()
    servicer.set("", status)
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        any_port = "127.0.0.1:0"
        if credentials is None:
            port = server.add_insecure_port(any_port)
        else:
            port = server.add_secure_port(any_port, credentials)
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


def test_a_missing_or_silent_server_is_unreachable() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert check(address) == Health.UNREACHABLE
        silent.listen()
        assert check(address, timeout_seconds=0.2) == Health.UNREACHABLE


def test_a_server_with_mutual_tls_is_asked_with_the_certificate_that_the_environment_names(
    tmp_path: Path,
) -> None:
    files = issued(tmp_path)
    pair = [(files.key.read_bytes(), files.cert.read_bytes())]
    mutual = grpc.ssl_server_credentials(pair, files.ca.read_bytes(), require_client_auth=True)
    with health_server(health_pb2.HealthCheckResponse.SERVING, mutual) as address:
        environment = {"TANDEM_CLIENT_TLS_CA_FILE": str(files.ca)}
        assert check(address, credentials_of(environment), timeout_seconds=1.0) == Health.UNREACHABLE
        environment["TANDEM_CLIENT_TLS_CERT_FILE"] = str(files.cert)
        environment["TANDEM_CLIENT_TLS_KEY_FILE"] = str(files.key)
        assert check(address, credentials_of(environment)) == Health.SERVING


def test_the_command_exits_with_that_code_and_words() -> None:
    command = [sys.executable, "-P", "-m", "tandem.serving.healthcheck"]
    with health_server(health_pb2.HealthCheckResponse.NOT_SERVING) as address:
        done = run(*command, address)
    assert (done.returncode, done.stdout) == (3, "not serving\n")
    done = run(*command)
    assert (done.returncode, done.stderr) == (2, "error: 0 addresses were given; give one, host:port\n")
