"""The error boundary: unreadable requests are refused, and errors become a status with one sentence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.errors import InvalidRequestError
from tandem.rpc.credentials import Credentials
from tandem.serving import interceptors
from tandem.v1 import generation_pb2
from tandem_target.servicer import TargetServicer
from tests.service.clients import until
from tests.service.fakes import serving
from tests.unit.tandem.serving.served import Scripted, health_of, running, texts_from

GENERATE = "/tandem.v1.GenerationService/Generate"
NOT_PROTOBUF = b"\xff\xff\xff\xff"
STALLED_SECONDS = 0.3
SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 65_536), ("grpc.http2.bdp_probe", 0))
"""Without this a reader buffers four megabytes that it never requested."""
PIECE = "x" * 10_000


def raw(channel: grpc.aio.Channel, path: str, kind: str = "unary_stream") -> Any:
    """Return a method that sends and receives raw bytes."""
    return getattr(channel, kind)(path)


@asynccontextmanager
async def connected(
    service: Scripted, capsys: pytest.CaptureFixture[str], **options: object
) -> AsyncIterator[tuple[str, grpc.aio.Channel]]:
    """The address of a server with these options, and a channel whose reader buffers little."""
    async with (
        running(service, capsys, **options) as address,
        grpc.aio.insecure_channel(address, options=SMALL_WINDOW) as channel,
    ):
        yield address, channel


@pytest.fixture
async def target_channel() -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a servicer without a model, and without an interceptor that says so."""
    async with serving(TargetServicer()) as (address, _), grpc.aio.insecure_channel(address) as channel:
        yield channel


@pytest.mark.parametrize(
    ("method", "kind", "request_"),
    [
        ("Verify", "stream_stream", iter([NOT_PROTOBUF])),
        ("GetModelInfo", "unary_unary", NOT_PROTOBUF),
        ("GetTokenizer", "unary_stream", NOT_PROTOBUF),
    ],
)
async def test_invalid_bytes_are_refused_by_every_kind_of_method(
    method: str, kind: str, request_: object, target_channel: grpc.aio.Channel
) -> None:
    path = f"/tandem.v1.TargetService/{method}"
    call = raw(target_channel, path, kind)(request_)
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "a message cannot be read" in (await call.details() or "")


async def test_an_internal_error_has_an_id_and_its_traceback_stays_in_the_log(
    caplog: pytest.LogCaptureFixture, target_channel: grpc.aio.Channel
) -> None:
    with caplog.at_level(logging.ERROR):
        call = raw(target_channel, "/tandem.v1.TargetService/GetModelInfo", "unary_unary")(b"")
        assert await call.code() is grpc.StatusCode.INTERNAL
    details = await call.details() or ""
    error_id = details.removeprefix("internal error ").partition(";")[0]
    assert "verifier" not in details
    (record,) = (record for record in caplog.records if getattr(record, "error_id", "") == error_id)
    assert record.exc_info is not None


async def test_what_an_error_quotes_of_a_request_stays_in_its_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def quoting() -> AsyncIterator[generation_pb2.GenerateResponse]:
        for quoted in ["a\n\x1b[31mb\ud800"]:
            raise InvalidRequestError(f"{quoted} is not an option")
        yield generation_pb2.GenerateResponse()

    async with connected(Scripted(quoting), capsys) as (_, channel):
        call = raw(channel, GENERATE)(b"")
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await call.details() == r"a\n\u001b[31mb\ud800 is not an option"


class Endless:
    """Endless messages, and a count of those that were sent."""

    def __init__(self) -> None:
        self.taken = 0

    async def __call__(self) -> AsyncIterator[generation_pb2.GenerateResponse]:
        while True:
            yield generation_pb2.GenerateResponse(text=PIECE)
            self.taken += 1


async def test_a_stalled_reader_is_bounded_and_then_ended(capsys: pytest.CaptureFixture[str]) -> None:
    pieces = Endless()
    service = Scripted(pieces)
    async with connected(service, capsys, stalled_reader_timeout_seconds=STALLED_SECONDS) as (_, channel):
        call = raw(channel, GENERATE)(b"")
        assert isinstance(await call.read(), bytes)
        await until(lambda: service.ended == 1, 20 * STALLED_SECONDS, lambda: str(pieces.taken))
        assert pieces.taken * len(PIECE) < 4 * 65_536, "the server may run ahead of the reader by one window"
        with suppress(grpc.aio.AioRpcError):
            while await call.read():  # first the buffered messages, then the status
                pass
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "not read for 0.3 s" in (await call.details() or "")


async def test_a_slow_reader_is_not_ended(capsys: pytest.CaptureFixture[str]) -> None:
    async with connected(Scripted(Endless()), capsys, stalled_reader_timeout_seconds=STALLED_SECONDS) as (
        _,
        channel,
    ):
        call = raw(channel, GENERATE)(b"")
        for _ in range(30):
            await asyncio.sleep(STALLED_SECONDS / 10)
            assert isinstance(await call.read(), bytes)
        call.cancel()


async def test_a_client_that_goes_during_a_message_leaves_nothing_in_the_log(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    failed = asyncio.Event()

    async def failing() -> AsyncIterator[generation_pb2.GenerateResponse]:
        yield generation_pb2.GenerateResponse(text="first")
        failed.set()
        raise grpc.aio.InternalError(
            "a message was not sent, and gRPC has not heard yet that its reader has gone"
        )

    service = Scripted(failing)
    async with connected(service, capsys) as (_, channel):
        call = raw(channel, GENERATE)(b"")
        await failed.wait()
        await asyncio.sleep(0.1)
        call.cancel()
        await until(lambda: service.ended == 1, SECONDS)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


SECONDS = 10.0
TOKEN = "the-token-of-clients"
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
SERVING = health_pb2.HealthCheckResponse.SERVING


def silent(channel: grpc.aio.Channel, path: str) -> Any:
    """Open a call and send no message."""
    return channel.stream_stream(path)(timeout=SECONDS)


def watch(channel: grpc.aio.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)


async def is_told(watching: Any) -> bool:
    """Return True if a watcher receives the server's health, False if it is refused."""
    with suppress(grpc.aio.AioRpcError):
        return bool((await watching.read()).status == SERVING)
    assert await watching.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "3 watchers of health" in (await watching.details() or "")
    return False


async def test_health_watchers_are_bounded_and_block_no_other_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(interceptors, "MAX_WATCHERS", 3)
    async with connected(Scripted(), capsys, auth_token=TOKEN, max_concurrent_streams=5) as (
        address,
        channel,
    ):
        watchers = [watch(channel) for _ in range(3)]
        assert [await is_told(watcher) for watcher in watchers] == [True] * 3
        for _ in range(5):
            assert not await is_told(watch(channel))
        assert await health_of(address) == "SERVING"
        assert await texts_from(address, Credentials(token=TOKEN)) == ["hello"]
        watchers[0].cancel()
        async with asyncio.timeout(SECONDS):
            while not await is_told(watch(channel)):
                pass


@pytest.mark.parametrize("path", [CHECK, WATCH])
async def test_a_health_call_without_a_message_is_ended(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(interceptors, "MESSAGE_SECONDS", 0.1)
    async with running(Scripted(), capsys, max_concurrent_streams=3) as address:
        async with grpc.aio.insecure_channel(address) as channel, AsyncExitStack() as calls:
            held = [silent(channel, path) for _ in range(2)]
            for call in held:
                calls.callback(call.cancel)
                assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                assert "no message" in (await call.details() or "")
        assert await texts_from(address) == ["hello"]


async def test_a_missing_token_is_refused_before_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    async with connected(Scripted(), capsys, auth_token=TOKEN) as (_, channel):
        call = silent(channel, GENERATE)
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "has no token" in (await call.details() or "")


@pytest.mark.parametrize("size", [0, 1 << 10, 3 << 20])
async def test_a_refusal_arrives_before_all_is_sent(size: int, capsys: pytest.CaptureFixture[str]) -> None:
    async with running(Scripted(), capsys, auth_token=TOKEN) as address:
        for _ in range(10):
            async with grpc.aio.insecure_channel(address) as channel:
                call = raw(channel, GENERATE)(bytes(size))
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
                with pytest.raises(grpc.aio.AioRpcError, match="has no token"):
                    await call.read()


async def test_messages_without_a_token_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    long = health_pb2.HealthCheckRequest(service="").SerializeToString() + b"\x0a\x00" * 4_000
    async with connected(Scripted(), capsys, auth_token=TOKEN) as (address, channel):
        for path in (CHECK, WATCH):
            call = raw(channel, path)(long, timeout=SECONDS)
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                [answer async for answer in call]
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await health_of(address) == "SERVING"
