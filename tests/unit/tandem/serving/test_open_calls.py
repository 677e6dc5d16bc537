"""Callers without a token can hold only few health watchers, and no call without its message."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.rpc.credentials import Credentials
from tandem.serving.interceptors import anonymous_calls as open_calls
from tests.unit.tandem.serving.served import Scripted, health_of, running, texts_from

SECONDS = 10.0
TOKEN = "the-token-of-clients"
GENERATE = "/tandem.v1.GenerationService/Generate"
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
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
    monkeypatch.setattr(open_calls, "MAX_WATCHERS", 3)
    async with (
        running(Scripted(), capsys, auth_token=TOKEN, max_concurrent_streams=5) as address,
        grpc.aio.insecure_channel(address) as channel,
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
    monkeypatch.setattr(open_calls, "_MESSAGE_SECONDS", 0.1)
    async with running(Scripted(), capsys, max_concurrent_streams=3) as address:
        async with grpc.aio.insecure_channel(address) as channel, AsyncExitStack() as calls:
            held = [silent(channel, path) for _ in range(2)]
            for call in held:
                calls.callback(call.cancel)
                assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                assert "no message" in (await call.details() or "")
        assert await texts_from(address) == ["hello"]


async def test_a_health_call_that_ends_without_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    async with running(Scripted(), capsys) as address, grpc.aio.insecure_channel(address) as channel:
        call = silent(channel, CHECK)
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        unreadable: Any = channel.unary_unary(CHECK)
        assert await unreadable(b"\xff\xff").code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_missing_token_is_refused_before_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    async with (
        running(Scripted(), capsys, auth_token=TOKEN) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        call = silent(channel, GENERATE)
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "has no token" in (await call.details() or "")


@pytest.mark.parametrize("size", [0, 1 << 10, 3 << 20])
async def test_a_refusal_arrives_while_the_client_still_sends(
    size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(Scripted(), capsys, auth_token=TOKEN) as address:
        for _ in range(10):
            async with grpc.aio.insecure_channel(address) as channel:
                method: Any = channel.unary_stream(GENERATE)
                call = method(bytes(size))
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
                with pytest.raises(grpc.aio.AioRpcError, match="has no token"):
                    await call.read()


async def test_messages_without_a_token_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    long = health_pb2.HealthCheckRequest(service="").SerializeToString() + b"\x0a\x00" * 4_000
    async with (
        running(Scripted(), capsys, auth_token=TOKEN) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        for path in (CHECK, WATCH):
            method: Any = channel.unary_stream(path)
            call = method(long, timeout=SECONDS)
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                [answer async for answer in call]
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await health_of(address) == "SERVING"
