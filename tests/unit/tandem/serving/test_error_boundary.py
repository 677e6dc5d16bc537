"""The error boundary: unreadable requests are refused, and errors become a status with one sentence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import pytest

from tandem.errors import CapacityError
from tandem.v1 import generation_pb2, target_pb2_grpc
from tandem.wire.status import retry_after_seconds
from target_service.servicer import TargetServicer
from tests.service.clients import until
from tests.service.fakes import serving
from tests.unit.tandem.serving.served import Scripted, refusal, running, texts_from

GENERATE = "/tandem.v1.GenerationService/Generate"
NOT_PROTOBUF = b"\xff\xff\xff\xff"
STALLED_SECONDS = 0.3
SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 65_536), ("grpc.http2.bdp_probe", 0))
"""Without this a reader buffers four megabytes that it never requested."""
PIECE = "x" * 10_000


def raw(channel: grpc.aio.Channel, path: str, kind: str = "unary_stream") -> Any:
    """Return a method that sends and receives raw bytes."""
    return getattr(channel, kind)(path)


async def test_invalid_bytes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    async with running(service := Scripted(), capsys) as address:
        async with grpc.aio.insecure_channel(address) as channel:
            call = raw(channel, GENERATE)(NOT_PROTOBUF)
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "a message cannot be read" in (await call.details() or "")
        assert service.ended == 0, "the method was never called"
        assert await texts_from(address) == ["hello"]


@pytest.mark.parametrize(
    ("method", "kind", "request_"),
    [
        ("Verify", "stream_stream", iter([NOT_PROTOBUF])),
        ("GetModelInfo", "unary_unary", NOT_PROTOBUF),
        ("GetTokenizer", "unary_stream", NOT_PROTOBUF),
    ],
)
async def test_invalid_bytes_are_refused_by_every_kind_of_method(
    method: str, kind: str, request_: object
) -> None:
    register = target_pb2_grpc.add_TargetServiceServicer_to_server
    async with (
        serving(lambda server: register(TargetServicer(), server)) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        path = f"/tandem.v1.TargetService/{method}"
        code = await raw(channel, path, kind)(request_).code()
        assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_internal_error_has_an_id_and_its_traceback_stays_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The servicer has no model; without a readiness interceptor its method fails."""
    register = target_pb2_grpc.add_TargetServiceServicer_to_server
    async with (
        serving(lambda server: register(TargetServicer(), server)) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        with caplog.at_level(logging.ERROR):
            call = raw(channel, "/tandem.v1.TargetService/GetModelInfo", "unary_unary")(b"")
            assert await call.code() is grpc.StatusCode.INTERNAL
    details = await call.details() or ""
    error_id = details.removeprefix("internal error ").partition(";")[0]
    assert "verifier" not in details
    (record,) = (record for record in caplog.records if getattr(record, "error_id", "") == error_id)
    assert record.exc_info is not None


async def test_a_refusal_has_a_retry_hint(capsys: pytest.CaptureFixture[str]) -> None:
    async def full() -> AsyncIterator[generation_pb2.GenerateResponse]:
        yield generation_pb2.GenerateResponse()
        raise CapacityError("full", retry_after_seconds=1.5)

    async with running(Scripted(full), capsys) as address:
        error = await refusal(address)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert retry_after_seconds(error.trailing_metadata()) == 1.5


class Endless:
    """Endless messages, and a count of those that were sent."""

    def __init__(self) -> None:
        self.taken = 0

    async def __call__(self) -> AsyncIterator[generation_pb2.GenerateResponse]:
        while True:
            yield generation_pb2.GenerateResponse(text=PIECE)
            self.taken += 1


async def test_a_stalled_reader_is_bounded_and_then_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pieces = Endless()
    service = Scripted(pieces)
    async with (
        running(service, capsys, stalled_reader_timeout_seconds=STALLED_SECONDS) as address,
        grpc.aio.insecure_channel(address, options=SMALL_WINDOW) as channel,
    ):
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
    async with (
        running(Scripted(Endless()), capsys, stalled_reader_timeout_seconds=STALLED_SECONDS) as address,
        grpc.aio.insecure_channel(address, options=SMALL_WINDOW) as channel,
    ):
        call = raw(channel, GENERATE)(b"")
        for _ in range(30):
            await asyncio.sleep(STALLED_SECONDS / 10)
            assert isinstance(await call.read(), bytes)
        call.cancel()
