"""Many sequences on one stream: none of them notices the others."""

# ruff: noqa: N802 - gRPC looks a method up by the name that it has in the proto.

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.lane import Lane, OwnStream
from coordinator.shared_stream import SharedLane
from coordinator.streams import Methods, Streams
from draft_service.service import DraftService
from draft_service.settings import DraftSettings
from tandem.channels import open_channel
from tandem.errors import (
    CapacityError,
    ProtocolError,
    ServiceUnavailableError,
    TandemError,
)
from tandem.serving.calls import RunningCalls
from tandem.serving.gate import Gate
from tandem.serving.handlers import Context
from tandem.serving.shared_stream import SharedStreams
from tandem.traffic import Traffic
from tandem.v1 import target_pb2, target_pb2_grpc
from tandem.v1.types_pb2 import SequenceEnd, SequencePart
from target_service.service import TargetService
from target_service.settings import TargetSettings
from tests.paths import DEMO_DRAFT, DEMO_TARGET
from tests.service.clients import until
from tests.service.fakes import FakeTarget, refusal, serving

SECONDS = 20.0
HOLD, REFUSE, FAIL, LEAVE = 1001, 1002, 1003, 1004
"""Steps that are not answered at once."""


class Echo(FakeTarget):
    """Answers a step with its own base length, but for some."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.messages: list[int] = []
        """How many parts each message of a shared stream had."""
        self.released = asyncio.Event()

    async def Verify(
        self, request_iterator: AsyncIterator[target_pb2.VerifyRequest], context: Context
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        has_begun = False
        try:
            async for request in request_iterator:
                if not has_begun:
                    has_begun = True
                    self.calls["sequences"] += 1
                    self.running += 1
                if request.HasField("finish"):
                    self.finished += 1
                    return
                match request.step.delta.base_length:
                    case 1001:
                        await self.released.wait()
                    case 1002:
                        raise refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
                    case 1003:
                        raise ValueError("a secret")
                    case 1004:
                        return
                yield target_pb2.VerifyResponse(base_length=request.step.delta.base_length)
        finally:
            self.running -= has_begun

    async def VerifyMany(
        self, request_iterator: AsyncIterator[target_pb2.VerifyManyRequest], context: Context
    ) -> AsyncIterator[target_pb2.VerifyManyResponse]:
        self.calls["shared streams"] += 1

        async def observed() -> AsyncIterator[target_pb2.VerifyManyRequest]:
            async for request in request_iterator:
                self.messages.append(len(request.parts))
                yield request

        async for response in super().VerifyMany(observed(), context):
            yield response


@dataclass(frozen=True)
class Ends:
    """Both ends of the streams."""

    service: Echo
    methods: Methods[target_pb2.VerifyResponse]
    streams: Streams[target_pb2.VerifyResponse]
    stub: target_pb2_grpc.TargetServiceStub
    server: grpc.aio.Server
    address: str

    def lanes(self, count: int) -> list[Lane[target_pb2.VerifyResponse]]:
        """One on a stream of its own, and so many that share one."""
        alone, *shared = [self.streams.lane() for _ in range(count + 1)]
        assert isinstance(alone, OwnStream)
        assert all(isinstance(lane, SharedLane) for lane in shared)
        return shared


@asynccontextmanager
async def ends() -> AsyncIterator[Ends]:
    service = Echo()
    async with (
        asyncio.timeout(SECONDS),
        serving(lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(service, server)) as (
            address,
            server,
        ),
        open_channel(address) as channel,
    ):
        stub = target_pb2_grpc.TargetServiceStub(channel)
        methods = Methods(
            service="target service",
            open_one=channel.stream_stream("/tandem.v1.TargetService/Verify"),
            read=target_pb2.VerifyResponse.FromString,
            open_many=channel.stream_stream("/tandem.v1.TargetService/VerifyMany"),
            message=lambda parts: target_pb2.VerifyManyRequest(parts=parts),
            read_many=target_pb2.VerifyManyResponse.FromString,
        )
        yield Ends(service, methods, Streams(methods), stub, server, address)


def step(base_length: int) -> target_pb2.VerifyRequest:
    request = target_pb2.VerifyRequest()
    request.step.delta.base_length = base_length
    return request


FINISH = target_pb2.VerifyRequest(finish=target_pb2.VerifyFinish())


async def asked(lane: Lane[target_pb2.VerifyResponse], base_length: int) -> int:
    return (await lane.ask(step(base_length))).base_length


async def test_the_first_has_a_stream_and_the_others_share_one() -> None:
    async with ends() as both:
        lanes = [both.streams.lane() for _ in range(17)]
        answers = await asyncio.gather(*(asked(lane, i) for i, lane in enumerate(lanes)))
        assert answers == list(range(17))
        assert both.service.calls == {"sequences": 17, "shared streams": 1}
        for lane in lanes:
            lane.cancel()
        await until(lambda: both.service.running == 0, SECONDS)
        alone = both.streams.lane()
        assert isinstance(alone, OwnStream), "with all others gone, the next is alone again"
        alone.cancel()


async def test_what_is_asked_and_answered_at_once_is_one_message() -> None:
    async with ends() as both:
        lanes = both.lanes(16)
        for _ in range(3):
            both.service.messages.clear()
            answers = [asyncio.create_task(asked(lane, HOLD)) for lane in lanes]
            await until(lambda: sum(both.service.messages) == 16, SECONDS)
            assert len(both.service.messages) == 1
            both.service.released.set()
            await asyncio.gather(*answers)
            both.service.released.clear()


async def test_what_one_carries_is_counted_as_its_own() -> None:
    async with ends() as both:
        alone, shared = Traffic(), Traffic()
        for traffic in (alone, shared):
            lane = both.streams.lane(traffic)
            await asked(lane, 7)
            await asked(lane, 300)
        sent = len(step(7).SerializeToString()) + len(step(300).SerializeToString())
        received = sum(
            len(target_pb2.VerifyResponse(base_length=length).SerializeToString()) for length in (7, 300)
        )
        assert alone == shared == Traffic(sent, received, 2, 2)


@pytest.mark.parametrize(
    ("length", "error", "sentence"),
    [
        (REFUSE, CapacityError, "target service: full"),
        (FAIL, ProtocolError, r"target service: internal error [0-9a-f]{12}; the server's log tells more"),
        (LEAVE, ServiceUnavailableError, "target service: it ended the stream"),
    ],
)
async def test_one_that_ends_takes_no_other_with_it(
    length: int, error: type[TandemError], sentence: str
) -> None:
    async with ends() as both:
        first, second = both.lanes(2)
        assert await asked(first, 1) == await asked(second, 1) == 1
        with pytest.raises(error, match=sentence):
            await asked(first, length)
        with pytest.raises(error, match=sentence):
            await asked(first, 2)
        assert await asked(second, 3) == 3
        assert both.service.calls["sequences"] == 2, "a question too late begins no sequence"
        first.cancel()
        assert await asked(second, 4) == 4


async def test_one_that_is_dropped_stops_at_once_and_no_other_does() -> None:
    async with ends() as both:
        first, second = both.lanes(2)
        assert await asked(second, 1) == 1
        held = asyncio.create_task(asked(first, HOLD))
        await until(lambda: both.service.running == 2, SECONDS)
        first.cancel()
        first.cancel()
        await until(lambda: both.service.running == 1, SECONDS)
        assert await asked(second, 2) == 2
        for late in (held, asked(first, 3)):
            with pytest.raises(ServiceUnavailableError):
                await late


async def test_one_that_finishes_has_ended_when_it_is_told() -> None:
    async with ends() as both:
        first, second = both.lanes(2)
        await asked(first, 1)
        held = asyncio.create_task(asked(second, HOLD))
        await first.finish(FINISH)
        assert (both.service.finished, both.service.running) == (1, 1)
        both.service.released.set()
        assert await held == HOLD


async def test_a_stream_that_breaks_ends_all_and_the_next_begin_anew() -> None:
    async with ends() as both:
        lanes = both.lanes(3)
        held = [asyncio.create_task(asked(lane, HOLD)) for lane in lanes]
        await until(lambda: both.service.running == 3, SECONDS)
        await both.server.stop(None)
        for each in held:
            with pytest.raises(ServiceUnavailableError):
                await each
        assert all(lane.was_sent for lane in lanes)
        last = both.streams.lane()
        with pytest.raises(ServiceUnavailableError):
            await asked(last, 1)
        assert not last.was_sent, "nobody was there"


async def test_an_old_stream_takes_nobody_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ends() as both:
        monkeypatch.setattr("coordinator.shared_stream._MOST_SECONDS", 0.0)
        first, second = both.lanes(2)
        assert await asked(first, 1) == 1
        assert await asked(second, 2) == 2
        assert await asked(first, 3) == 3
        assert both.service.calls["shared streams"] == 2


async def test_a_server_that_drains_takes_no_sequence_and_ends_none() -> None:
    gate, calls = Gate(""), RunningCalls()
    async with ends() as both:
        both.service.shared.stand_behind(gate, calls, most=2)
        first, second, third = both.lanes(3)
        held = [asyncio.create_task(asked(lane, HOLD)) for lane in (first, second)]
        await until(lambda: both.service.running == 2, SECONDS)
        with pytest.raises(CapacityError, match="2 calls run already, which is the most; try again"):
            await asked(third, 1)
        gate.closed_because = "the target service is draining"
        late = both.streams.lane()
        with pytest.raises(ServiceUnavailableError, match="the target service is draining"):
            await asked(late, 1)
        assert not await calls.end(0.01), "a drain waits for what runs"
        both.service.released.set()
        assert await asyncio.gather(*held) == [HOLD, HOLD]
        calls.cut_off("it has drained for as long as it may")
        with pytest.raises(ServiceUnavailableError, match="for as long as it may"):
            await asked(first, 2)


async def test_what_cannot_be_read_ends_its_sequence_alone() -> None:
    """By hand, as a faulty coordinator would."""
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


async def test_what_says_nothing_of_a_sequence_is_passed_over() -> None:
    async with ends() as both:
        call = both.stub.VerifyMany()
        nothing = [SequencePart(), SequencePart(sequence=9, end=SequenceEnd())]
        good = SequencePart(sequence=1, message=step(5).SerializeToString())
        await call.write(target_pb2.VerifyManyRequest(parts=[*nothing, good]))
        (part,) = await read(call, 1)
        assert (part.sequence, both.service.calls["sequences"]) == (1, 1)
        call.cancel()


async def test_a_stream_that_is_left_open_at_its_end_ends_its_sequences() -> None:
    """Half-closed without a Finish: they are told that nothing more comes, and the stream ends after them."""
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


async def test_a_stream_that_cannot_be_read_says_so_and_ends_its_sequences() -> None:
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


async def test_whoever_asks_without_waiting_is_not_read_meanwhile() -> None:
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
    service.released.set()  # now it is read to its end: the sequence's words, and that it ended
    count = len((await waiting).parts) + sum([len(response.parts) async for response in answers])
    assert (taken, count) == (1000, 1001)


async def test_what_a_sequence_leaves_unread_keeps_nobody_waiting() -> None:
    async def flood() -> AsyncIterator[target_pb2.VerifyManyRequest]:
        for length in [LEAVE, *[HOLD] * 1000]:
            yield target_pb2.VerifyManyRequest(
                parts=[SequencePart(sequence=1, message=step(length).SerializeToString())]
            )

    async with asyncio.timeout(SECONDS):
        answers = Echo().VerifyMany(flood(), cast("Context", None))
        (part,) = [part async for response in answers for part in response.parts]
    assert part.HasField("end")


async def test_whoever_does_not_read_is_not_answered_without_end() -> None:
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

    answers = SharedStreams().serve(flood(), behaviour, bytes)
    assert len(await anext(answers)) == 1
    for _ in range(200):
        await asyncio.sleep(0)
    assert answered < 8
    assert sum([len(parts) async for parts in answers]) == 100
    assert answered == 100


async def test_an_answer_that_cannot_be_read_is_the_services_fault() -> None:
    async def garble(_requests: AsyncIterator[bytes], _context: Context) -> AsyncIterator[bytes]:
        yield b"\xff"

    method: Any = grpc.stream_stream_rpc_method_handler(garble)
    handler = grpc.method_handlers_generic_handler("garbling", {"garble": method})
    async with (
        ends() as both,
        serving(lambda server: server.add_generic_rpc_handlers((handler,))) as (address, _),
        open_channel(address) as channel,
    ):
        garbling: Any = channel.stream_stream("/garbling/garble")
        streams = Streams(replace(both.methods, open_one=garbling, open_many=garbling))
        for lane in (streams.lane(), streams.lane()):
            with pytest.raises(ProtocolError, match="target service: its answer cannot be read"):
                await asked(lane, 1)
            lane.cancel()


async def read(
    call: grpc.aio.StreamStreamCall[target_pb2.VerifyManyRequest, target_pb2.VerifyManyResponse], count: int
) -> list[SequencePart]:
    """The next parts, in however many messages."""
    parts: list[SequencePart] = []
    while len(parts) < count:
        response = await call.read()
        assert isinstance(response, target_pb2.VerifyManyResponse)
        parts += response.parts
    return sorted(parts, key=lambda part: part.sequence)


ACTS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["ask", "hold", "finish", "drop", "refuse"])), max_size=40
)


async def done(act: str, lane: Lane[target_pb2.VerifyResponse], base_length: int) -> bool:
    """Do that with a lane. Whether it is of use afterwards."""
    match act:
        case "ask":
            assert await asked(lane, base_length) == base_length
        case "hold":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await asked(lane, HOLD)
            lane.cancel()
        case "finish":
            await lane.finish(FINISH)
        case "drop":
            lane.cancel()
        case _:
            with pytest.raises(CapacityError):
                await asked(lane, REFUSE)
    return act == "ask"


@given(acts=ACTS)
@settings(max_examples=40)
async def test_whatever_the_others_do_each_gets_its_own_answers(acts: list[tuple[int, str]]) -> None:
    async with ends() as both:
        lanes = [both.streams.lane() for _ in range(6)]

        async def play(own: int) -> None:
            is_of_use = True
            for turn, (number, act) in enumerate(acts):
                if number == own and is_of_use:
                    is_of_use = await done(act, lanes[own], 10 * turn + own)
            if is_of_use:
                assert await asked(lanes[own], own) == own
            lanes[own].cancel()

        await asyncio.gather(*map(play, range(6)))
        await until(lambda: both.service.running == 0, SECONDS)


@pytest.mark.parametrize("role", ["target", "draft"])
async def test_a_services_gate_stands_before_its_shared_streams(role: str) -> None:
    """A drain that did not would be masked: what it cuts off goes on elsewhere."""
    service: Any = (
        TargetService(TargetSettings(model=DEMO_TARGET))
        if role == "target"
        else DraftService(DraftSettings(model=DEMO_DRAFT))
    )
    service.open_other_ways(Gate("it is closed"), RunningCalls())
    async with (
        asyncio.timeout(SECONDS),
        serving(service.register) as (address, _),
        open_channel(address) as channel,
    ):
        method = {"target": "TargetService/VerifyMany", "draft": "DraftService/ProposeMany"}[role]
        call: Any = channel.stream_stream(f"/tandem.v1.{method}")()
        part = SequencePart(sequence=1, message=FINISH.SerializeToString())
        await call.write(target_pb2.VerifyManyRequest(parts=[part]).SerializeToString())
        (answer,) = target_pb2.VerifyManyResponse.FromString(await call.read()).parts
        assert answer.end.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert answer.end.message == "it is closed"
        call.cancel()
