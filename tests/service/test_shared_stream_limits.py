"""Damaged messages, floods and slow readers on a shared stream harm only their own sequence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from coordinator.transport.streams import StreamChoice
from tandem.errors import (
    ProtocolError,
)
from tandem.rpc.channels import open_channel
from tandem.serving.interceptors import Context
from tandem.serving.streams import MultiplexedStreams
from tandem.v1 import target_pb2
from tandem.v1.types_pb2 import SequenceEnd, SequencePart
from tests.service.clients import until
from tests.service.echo_servicer import HOLD, LEAVE, SECONDS, Echo, answer_to, ends, read, step
from tests.service.fakes import serving


async def test_an_unreadable_part_ends_only_its_sequence() -> None:
    """Send the messages by hand, as a faulty coordinator would."""
    async with ends() as both:
        call = both.stub.VerifyMany()
        good = SequencePart(sequence=2, message=step(5).SerializeToString())
        await call.write(
            target_pb2.VerifyManyRequest(parts=[SequencePart(sequence=1, message=b"\xff"), good])
        )
        parts = await read(call, 2)
        assert [part.sequence for part in parts] == [1, 2]
        assert parts[0].end.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert parts[0].end.message.startswith("a message cannot be read; its bytes must be the protobuf")
        assert target_pb2.VerifyResponse.FromString(parts[1].message).base_length == 5
        call.cancel()


async def test_empty_parts_are_ignored() -> None:
    async with ends() as both:
        call = both.stub.VerifyMany()
        nothing = [SequencePart(), SequencePart(sequence=9, end=SequenceEnd())]
        good = SequencePart(sequence=1, message=step(5).SerializeToString())
        await call.write(target_pb2.VerifyManyRequest(parts=[*nothing, good]))
        (part,) = await read(call, 1)
        assert (part.sequence, both.service.calls["sequences"]) == (1, 1)
        call.cancel()


async def test_a_stream_that_is_left_open_at_its_end_ends_its_sequences() -> None:
    """The stream is half-closed without a Finish: its sequences get an error, and then the stream ends."""
    async with ends() as both:
        call = both.stub.VerifyMany()
        await call.write(
            target_pb2.VerifyManyRequest(
                parts=[SequencePart(sequence=i, message=step(i).SerializeToString()) for i in (1, 2)]
            )
        )
        await read(call, 2)
        await call.done_writing()
        assert [part.WhichOneof("part") for part in await read(call, 2)] == ["end", "end"]
        assert await call.code() is grpc.StatusCode.OK
        assert both.service.running == 0


async def test_an_unreadable_message_ends_the_stream_and_its_sequences() -> None:
    async with ends() as both, open_channel(both.address) as channel:
        call: Any = channel.stream_stream("/tandem.v1.TargetService/VerifyMany")()
        held = SequencePart(sequence=1, message=step(HOLD).SerializeToString())
        await call.write(target_pb2.VerifyManyRequest(parts=[held]).SerializeToString())
        await until(lambda: both.service.running == 1, SECONDS)
        await call.write(b"\xff")
        with suppress(grpc.aio.AioRpcError):
            await call.read()
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert both.service.running == 0


async def test_a_flood_of_requests_is_not_read_ahead() -> None:
    taken = 0

    async def flood() -> AsyncIterator[target_pb2.VerifyManyRequest]:
        nonlocal taken
        for _ in range(1000):
            taken += 1
            yield target_pb2.VerifyManyRequest(
                parts=[SequencePart(sequence=1, message=step(HOLD).SerializeToString())]
            )

    service = Echo()
    answers = service.VerifyMany(flood(), cast("Context", None))
    waiting = asyncio.ensure_future(anext(answers))
    await until(lambda: service.running == 1, SECONDS)
    for _ in range(100):
        await asyncio.sleep(0)
    assert taken < 20
    service.released.set()  # now the stream is read to its end: the sequence's answers, and its end
    count = len((await waiting).parts) + sum([len(response.parts) async for response in answers])
    assert (taken, count) == (1000, 1001)


async def test_unread_answers_of_one_sequence_do_not_block_others() -> None:
    async def flood() -> AsyncIterator[target_pb2.VerifyManyRequest]:
        for length in [LEAVE, *[HOLD] * 1000]:
            yield target_pb2.VerifyManyRequest(
                parts=[SequencePart(sequence=1, message=step(length).SerializeToString())]
            )

    async with asyncio.timeout(SECONDS):
        answers = Echo().VerifyMany(flood(), cast("Context", None))
        (part,) = [part async for response in answers for part in response.parts]
    assert part.HasField("end")


async def test_answers_to_a_client_that_does_not_read_are_bounded() -> None:
    answered = 0

    async def behaviour(requests: AsyncIterator[bytes]) -> AsyncIterator[target_pb2.VerifyResponse]:
        nonlocal answered
        async for _ in requests:
            answered += 1
            response = target_pb2.VerifyResponse()
            response.dense_rows.data = bytes(1 << 20)
            yield response

    async def flood() -> AsyncIterator[target_pb2.VerifyManyRequest]:
        for _ in range(100):
            yield target_pb2.VerifyManyRequest(parts=[SequencePart(sequence=1, message=b"step")])

    answers = MultiplexedStreams().serve(flood(), behaviour, bytes)
    assert len(await anext(answers)) == 1
    for _ in range(200):
        await asyncio.sleep(0)
    assert answered < 8
    assert sum([len(parts) async for parts in answers]) == 100
    assert answered == 100


async def test_an_unreadable_answer_is_the_services_fault() -> None:
    async def garble(requests: AsyncIterator[bytes], _context: Context) -> AsyncIterator[bytes]:
        # It answers on demand: a stream that ends while the client still writes fails differently.
        async for _ in requests:
            yield b"\xff"

    method: Any = grpc.stream_stream_rpc_method_handler(garble)
    handler = grpc.method_handlers_generic_handler("garbling", {"garble": method})
    async with (
        ends() as both,
        serving(lambda server: server.add_generic_rpc_handlers((handler,))) as (address, _),
        open_channel(address) as channel,
    ):
        garbling: Any = channel.stream_stream("/garbling/garble")
        streams = StreamChoice(replace(both.methods, open_one=garbling, open_many=garbling))
        for sequence in (streams.stream(), streams.stream()):
            with pytest.raises(ProtocolError, match="target service: its answer cannot be read"):
                await answer_to(sequence, 1)
            sequence.cancel()
