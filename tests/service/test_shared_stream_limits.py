"""Damaged messages, floods and slow readers on a shared stream harm only their own sequence."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import grpc
import grpc.aio
import numpy as np
import pytest

from coordinator.transport.streams import Streams
from tandem.errors import ProtocolError
from tandem.rpc.channels import open_channel
from tandem.serving.interceptors import Context
from tandem.types import DenseRow, Verification, VerifyStep
from tandem.v1 import target_pb2
from tandem.wire.target import answers_from_proto
from tests.service.clients import until
from tests.service.echo_servicer import HOLD, LEAVE, SECONDS, Asker, Echo, asking, ends, read
from tests.service.fakes import FakeTarget, serving


def raw(first: list[int], *others: list[int]) -> target_pb2.VerifyRequest:
    """A message that opens two sequences, with these records of steps in place of their own."""
    message = asking((1, 5), (2, 5))
    message.steps.records = b"".join(struct.pack(f"<{len(record)}i", *record) for record in (first, *others))
    return message


SECOND = [2, 5, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (raw([1, -1, 0, 1, 0, 0], SECOND), "delta.base_length is -1"),
        (raw([1, 5, 0, 1, -1, 0], SECOND), "row_count is -1"),
        (raw([1, 5, 0, 9, 0, 0], SECOND), "row_kind is 9"),
        (asking((1, 5), (2, 5)), "temperature is -1"),
    ],
)
async def test_an_invalid_step_or_opening_ends_only_its_sequence(
    message: target_pb2.VerifyRequest, words: str
) -> None:
    """Send the messages by hand, as a faulty coordinator would."""
    if "temperature" in words:
        message.opens[0].sampling.temperature = -1.0
    async with ends() as both:
        call = both.stub.Verify()
        await call.write(message)
        found = await read(call, 2)
        assert found[1].code is grpc.StatusCode.INVALID_ARGUMENT
        assert words in found[1].sentence
        assert found[2].base_length == 5
        call.cancel()


async def test_a_sequence_must_begin_with_one_open() -> None:
    async with ends() as both:
        call = both.stub.Verify()
        await call.write(asking((1, 5), opens=False))
        found = await read(call, 1)
        assert "without open" in found[1].sentence
        await call.write(asking((2, 5)))
        assert (await read(call, 1))[2].base_length == 5
        await call.write(asking((2, 5)))
        assert "opened twice" in (await read(call, 1))[2].sentence
        await call.write(target_pb2.VerifyRequest(cancelled_sequences=[9]))  # nobody knows it
        call.cancel()


async def test_a_stream_that_is_left_open_at_its_end_ends_its_sequences() -> None:
    """The stream is half-closed without a Finish: its sequences get an error, and then the stream ends."""
    async with ends() as both:
        call = both.stub.Verify()
        await call.write(asking((1, 1), (2, 2)))
        await read(call, 2)
        await call.done_writing()
        assert ["without finish" in each.sentence for each in (await read(call, 2)).values()] == [True, True]
        assert await call.code() is grpc.StatusCode.OK
        assert both.service.running == 0


@pytest.mark.parametrize(
    "content",
    [
        b"\xff",
        raw(SECOND[:-1]).SerializeToString(),
        raw([1, 5, 7, 1, 0, 0]).SerializeToString(),
        raw([1, 5, -1, 1, 0, 0]).SerializeToString(),
    ],
)
async def test_an_unreadable_message_ends_the_stream_and_its_sequences(content: bytes) -> None:
    async with ends() as both, open_channel(both.address) as channel:
        call: Any = channel.stream_stream("/tandem.v1.TargetService/Verify")()
        await call.write(asking((1, HOLD)).SerializeToString())
        await until(lambda: both.service.running == 1, SECONDS)
        await call.write(content)
        with suppress(grpc.aio.AioRpcError):
            await call.read()
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert both.service.running == 0


async def flood(*lengths: int) -> AsyncIterator[target_pb2.VerifyRequest]:
    """A message for each step of one sequence."""
    for i, length in enumerate(lengths):
        yield asking((1, length), opens=not i)


async def test_a_flood_of_requests_is_not_read_ahead() -> None:
    taken = 0

    async def counted() -> AsyncIterator[target_pb2.VerifyRequest]:
        nonlocal taken
        async for message in flood(*[HOLD] * 1000):
            taken += 1
            yield message

    service = Echo()
    answers = service.Verify(counted(), cast("Context", None))
    waiting = asyncio.ensure_future(anext(answers))
    await until(lambda: service.running == 1, SECONDS)
    for _ in range(100):
        await asyncio.sleep(0)
    assert taken < 20
    service.released.set()  # now the stream is read to its end: the sequence's answers, and its end
    messages = [await waiting, *[response async for response in answers]]
    assert (taken, sum(len(list(answers_from_proto(each))) for each in messages)) == (1000, 1001)


async def test_requests_of_a_sequence_that_has_ended_do_not_block_others() -> None:
    async with asyncio.timeout(SECONDS):
        answers = Echo().Verify(flood(LEAVE, *[HOLD] * 1000), cast("Context", None))
        (end,) = [end async for response in answers for end in response.ends]
    assert end.code == 0


class Large(FakeTarget):
    """Answers a mebibyte."""

    answered = 0

    async def verified(self, tokens: Sequence[int], step: VerifyStep) -> Verification:
        self.answered += 1
        return Verification(0, (DenseRow(np.zeros(1 << 18, np.float32)),))


async def test_answers_to_a_client_that_does_not_read_are_bounded() -> None:
    service = Large()
    answers = service.Verify(flood(*[0] * 100), cast("Context", None))
    assert len((await anext(answers)).verifications) == 1
    for _ in range(200):
        await asyncio.sleep(0)
    assert service.answered < 8
    assert sum([len(response.verifications) async for response in answers]) == 99
    assert service.answered == 100


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
        sequence = Asker(Streams(replace(both.method, open=garbling)))
        with pytest.raises(ProtocolError, match="target service: its answer cannot be read"):
            await sequence.ask(1)
        sequence.stream.cancel()
