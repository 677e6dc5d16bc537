"""Many sequences share a stream and its messages, and do not affect each other, whatever is sent on it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import grpc
import grpc.aio
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.errors import CapacityError, ProtocolError, ServiceUnavailableError, TandemError
from tandem.model.types import (
    Cancel,
    Delta,
    DenseRow,
    DraftOptions,
    Pending,
    RowKind,
    SamplingParams,
    TargetOptions,
    Verification,
    VerifyStep,
)
from tandem.rpc.channels import open_channel
from tandem.serving.interceptors import Context, RunningCalls
from tandem.v1 import draft_pb2, target_pb2, target_pb2_grpc
from tandem.wire import draft as draft_wire
from tandem.wire import target as wire
from tandem.wire.target import answers_from_proto
from tandem_coordinator.telemetry.observer import StreamObserver
from tandem_coordinator.transport.streams import StreamedSequence, Streams
from tandem_draft.service import DraftService
from tandem_draft.settings import DraftSettings
from tandem_load.fakes import LeaveError
from tandem_target.service import TargetService
from tandem_target.servicer import VerifiedFor
from tandem_target.settings import TargetSettings
from tests.paths import DEMO_DRAFT, DEMO_TARGET
from tests.service.clients import until
from tests.service.fakes import FakeTarget, refusal, serving

SECONDS = 20.0
HOLD, REFUSE, FAIL, LEAVE, DENSE = 1001, 1002, 1003, 1004, 1005
"""Steps that are answered late, or not at all."""
OPTIONS = TargetOptions("r", SamplingParams())


class Echo(FakeTarget):
    """Answers each step with its base length, except for some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.messages: list[int] = []
        """Number of steps of each message."""
        self.released = asyncio.Event()
        self.taken: list[int] = []
        """Base lengths of all steps."""
        self.waits = False

    async def serve_sequence(self, sequence: VerifiedFor) -> None:
        self.calls["sequences"] += 1
        self.running += 1
        try:
            sequence.is_waiting = lambda: self.waits
            async for step in sequence.steps():
                self.taken.append(step.delta.base_length)
                rows: tuple[DenseRow, ...] = ()
                match step.delta.base_length:
                    case 1001:
                        await self.released.wait()
                    case 1002:
                        raise refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
                    case 1003:
                        raise ValueError("a secret")
                    case 1004:
                        raise LeaveError
                    case 1005:
                        rows = (DenseRow(np.zeros(2, np.float32)),)
                await sequence.answer(Verification(step.delta.base_length, rows))
            self.finished += 1
        except LeaveError:
            pass
        finally:
            self.running -= 1

    async def Verify(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[target_pb2.VerifyRequest], context: Context
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        self.calls["streams"] += 1

        async def observed() -> AsyncIterator[target_pb2.VerifyRequest]:
            async for request in request_iterator:
                self.messages.append(sum(part.HasField("step") for part in request.parts))
                yield request

        async for response in super().Verify(observed(), context):
            yield response


class Asker(StreamedSequence[Any, Any]):
    """The coordinator's end of a sequence."""

    def __init__(self, streams: Streams[Any, Any]) -> None:
        super().__init__(streams, StreamObserver())
        self._answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._is_open = False

    async def ask(self, base_length: int) -> int:
        """The length that answers a step with this one."""
        if self.error is not None:
            raise self.error
        if not self._is_open:
            self.send(OPTIONS)
        self._is_open = True
        self._answer = asyncio.get_running_loop().create_future()
        self.send(step(base_length))
        return await self._answer

    def take(self, answer: wire.Answer) -> None:
        if not self._answer.done():
            self._answer.set_result(answer.base_length)

    def notify(self) -> None:
        if self.error is not None and self._is_open and not self._answer.done():
            self._answer.set_exception(self.error)


@dataclass(frozen=True)
class Ends:
    service: Echo
    streams: Streams[Any, Any]
    stub: target_pb2_grpc.TargetServiceStub
    server: grpc.aio.Server
    address: str

    def sequences(self, count: int) -> list[Asker]:
        return [Asker(self.streams) for _ in range(count)]


@asynccontextmanager
async def ends() -> AsyncIterator[Ends]:
    service = Echo()
    async with (
        asyncio.timeout(SECONDS),
        serving(service) as (address, server),
        open_channel(address) as channel,
    ):
        streams: Streams[Any, Any] = Streams(
            service="target service",
            call=channel.stream_stream("/tandem.v1.TargetService/Verify"),
            write=wire.requests_to_proto,
            read=lambda content: wire.answers_from_proto(target_pb2.VerifyResponse.FromString(content)),
        )
        stub = target_pb2_grpc.TargetServiceStub(channel)
        yield Ends(service, streams, stub, server, address)


def step(base_length: int) -> VerifyStep:
    return VerifyStep(Delta(base_length, ()), RowKind.TOKEN, 0)


def asking(*steps: tuple[int, int], opens: bool = True) -> target_pb2.VerifyRequest:
    """A message that opens sequences and asks: pairs of a sequence and its step's base length."""
    opened = [(number, OPTIONS) for number in dict.fromkeys(number for number, _ in steps)]
    return wire.requests_to_proto(
        [*(opened if opens else ()), *((number, step(length)) for number, length in steps)]
    )


def numbered(number: int, length: int, serial: int, *, opens: bool = False) -> target_pb2.VerifyRequest:
    """A message with a step that may be asked again."""
    opening = [(number, OPTIONS)] if opens else []
    return wire.requests_to_proto([*opening, (number, replace(step(length), serial=serial))])


async def read(
    call: grpc.aio.StreamStreamCall[target_pb2.VerifyRequest, target_pb2.VerifyResponse], count: int
) -> dict[int, Any]:
    """Return the next answers by sequence, from any number of messages."""
    found: dict[int, Any] = {}
    while len(found) < count:
        response = await call.read()
        assert isinstance(response, target_pb2.VerifyResponse)
        found |= dict(wire.answers_from_proto(response))
    return found


async def test_all_sequences_share_a_stream_that_ends_with_the_last() -> None:
    async with ends() as both:
        sequences = both.sequences(17)
        answers = await asyncio.gather(*(sequence.ask(i) for i, sequence in enumerate(sequences)))
        assert answers == list(range(17))
        assert both.service.calls == {"sequences": 17, "streams": 1}
        for sequence in sequences:
            sequence.cancel()
        await until(lambda: both.service.running == 0)
        (later,) = both.sequences(1)
        assert await later.ask(1) == 1
        assert both.service.calls["streams"] == 2
        later.cancel()


async def test_simultaneous_requests_and_answers_travel_in_one_message() -> None:
    async with ends() as both:
        sequences = both.sequences(16)
        for _ in range(3):
            both.service.messages.clear()
            answers = [asyncio.create_task(sequence.ask(HOLD)) for sequence in sequences]
            await until(lambda: sum(both.service.messages) == 16)
            assert len(both.service.messages) == 1
            both.service.released.set()
            await asyncio.gather(*answers)
            both.service.released.clear()


@pytest.mark.parametrize(
    ("length", "error", "sentence"),
    [
        (REFUSE, CapacityError, "target service: full"),
        (
            FAIL,
            ProtocolError,
            r"target service: internal error [0-9a-f]{12}; the server's log has the details",
        ),
        (LEAVE, ServiceUnavailableError, "target service: it ended the stream"),
    ],
)
async def test_an_ending_sequence_ends_no_other(length: int, error: type[TandemError], sentence: str) -> None:
    async with ends() as both:
        first, second = both.sequences(2)
        assert await first.ask(1) == await second.ask(1) == 1
        with pytest.raises(error, match=sentence):
            await first.ask(length)
        with pytest.raises(error, match=sentence):
            await first.ask(2)
        assert await second.ask(3) == 3
        assert both.service.calls["sequences"] == 2, "a late request must not begin a sequence"
        first.cancel()
        assert await second.ask(4) == 4


async def test_finish_returns_after_the_sequence_has_ended() -> None:
    async with ends() as both:
        first, second = both.sequences(2)
        await first.ask(1)
        held = asyncio.create_task(second.ask(HOLD))
        await first.finish()
        assert (both.service.finished, both.service.running) == (1, 1)
        both.service.released.set()
        assert await held == HOLD


async def test_a_broken_stream_ends_its_sequences_and_later_ones_get_a_new_stream() -> None:
    async with ends() as both:
        sequences = both.sequences(3)
        held = [asyncio.create_task(sequence.ask(HOLD)) for sequence in sequences]
        await until(lambda: both.service.running == 3)
        await both.server.stop(None)
        for each in held:
            with pytest.raises(ServiceUnavailableError):
                await each
        assert all(sequence.was_sent for sequence in sequences)
        last = Asker(both.streams)
        with pytest.raises(ServiceUnavailableError):
            await last.ask(1)
        assert not last.was_sent, "nobody was there"


async def test_an_old_stream_accepts_no_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ends() as both:
        monkeypatch.setattr("tandem_coordinator.transport.streams.MAX_STREAM_SECONDS", 0.0)
        first, second = both.sequences(2)
        assert await first.ask(1) == 1
        assert await second.ask(2) == 2
        assert await first.ask(3) == 3
        assert both.service.calls["streams"] == 2


async def test_a_draining_server_accepts_no_sequence_and_ends_none() -> None:
    calls = RunningCalls(max_calls=2)
    async with ends() as both:
        both.service.streams.calls = calls
        first, second, third = both.sequences(3)
        held = [asyncio.create_task(sequence.ask(HOLD)) for sequence in (first, second)]
        await until(lambda: both.service.running == 2)
        with pytest.raises(CapacityError, match="2 calls run already, which is the most; try again"):
            await third.ask(1)
        calls.closed_because = "the target service is draining"
        late = Asker(both.streams)
        with pytest.raises(ServiceUnavailableError, match="the target service is draining"):
            await late.ask(1)
        assert not await calls.end(0.01), "a drain waits for running sequences"
        both.service.released.set()
        assert await asyncio.gather(*held) == [HOLD, HOLD]
        calls.cut_off(ServiceUnavailableError("it has drained for as long as it may"))
        with pytest.raises(ServiceUnavailableError, match="for as long as it may"):
            await first.ask(2)


ACTS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["ask", "hold", "finish", "drop", "refuse"])), max_size=40
)


async def done(act: str, sequence: Asker, base_length: int) -> bool:
    """Apply the action to a sequence; return True if it is usable afterwards."""
    match act:
        case "ask":
            assert await sequence.ask(base_length) == base_length
        case "hold":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await sequence.ask(HOLD)
            sequence.cancel()
        case "finish":
            await sequence.finish()
        case "drop":
            sequence.cancel()
        case _:
            with pytest.raises(CapacityError):
                await sequence.ask(REFUSE)
    return act == "ask"


@given(acts=ACTS)
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
async def test_each_sequence_gets_its_own_answers_whatever_others_do(acts: list[tuple[int, str]]) -> None:
    async with ends() as both:
        sequences = both.sequences(6)

        async def run_sequence(own: int) -> None:
            is_of_use = True
            for turn, (number, act) in enumerate(acts):
                if number == own and is_of_use:
                    is_of_use = await done(act, sequences[own], 10 * turn + own)
            if is_of_use:
                assert await sequences[own].ask(own) == own
            sequences[own].cancel()

        await asyncio.gather(*map(run_sequence, range(6)))
        await until(lambda: both.service.running == 0)


@pytest.mark.parametrize("role", ["target", "draft"])
async def test_a_services_readiness_applies_to_its_sequences(role: str) -> None:
    """Otherwise the fault would be masked: sequences that a drain cuts off continue elsewhere."""
    service: Any = (
        TargetService(TargetSettings(model=DEMO_TARGET))
        if role == "target"
        else DraftService(DraftSettings(model=DEMO_DRAFT))
    )
    service.open_other_endpoints(RunningCalls("it is closed"))
    async with (
        asyncio.timeout(SECONDS),
        serving(service.register) as (address, _),
        open_channel(address) as channel,
    ):
        method = {"target": "TargetService/Verify", "draft": "DraftService/Propose"}[role]
        call: Any = channel.stream_stream(f"/tandem.v1.{method}")()
        opening: Any = (
            asking((1, 5))
            if role == "target"
            else draft_wire.requests_to_proto([(1, DraftOptions("r", SamplingParams()))])
        )
        await call.write(opening.SerializeToString())
        response: Any = {"target": target_pb2.VerifyResponse, "draft": draft_pb2.ProposeResponse}[role]
        (part,) = response.FromString(await call.read()).parts
        end = part.ending
        assert end.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert end.message == "it is closed"
        call.cancel()


def broken(change: Callable[[Any], None]) -> target_pb2.VerifyRequest:
    """A message that opens two sequences and asks both, with a change to the first one's open and step."""
    message = asking((1, 5), (2, 5))
    change(message.parts)
    return message


def with_negative_temperature(parts: Any) -> None:
    parts[0].open.sampling.temperature = -1.0


def with_negative_base_length(parts: Any) -> None:
    parts[2].step.committed.base_length = -1


def with_unknown_rows(parts: Any) -> None:
    parts[2].step.rows.kind = 9


def with_long_lead(parts: Any) -> None:
    parts[2].step.lead.credits = 9


def without_tokens(parts: Any) -> None:
    parts[2].step.ClearField("committed")


def without_content(parts: Any) -> None:
    parts[2].ClearField("step")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_negative_base_length, "committed.base_length is -1"),
        (with_unknown_rows, "rows.kind is 9"),
        (with_long_lead, "lead.credits is 9"),
        (with_negative_temperature, "temperature is -1"),
        (without_tokens, "step.committed is missing; it must be set"),
        (without_content, "a part has no content"),
    ],
)
async def test_an_invalid_step_or_opening_ends_only_its_sequence(
    change: Callable[[Any], None], words: str
) -> None:
    """Send the messages by hand, as a faulty coordinator would."""
    async with ends() as both:
        call = both.stub.Verify()
        await call.write(broken(change))
        found = await read(call, 2)
        assert found[1].code is grpc.StatusCode.INVALID_ARGUMENT
        assert words in found[1].sentence
        assert found[2].base_length == 5
        call.cancel()


async def test_a_part_of_no_sequence_ends_the_stream() -> None:
    async with ends() as both:
        call = both.stub.Verify()
        await call.write(asking((0, 5)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == "a part's sequence is 0; sequences count from 1"


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
        await call.write(wire.requests_to_proto([(9, Cancel())]))  # nobody knows it
        call.cancel()


async def test_a_step_that_is_asked_again_is_answered_again_and_taken_once() -> None:
    async with ends() as both:
        call = both.stub.Verify()
        for _ in range(2):
            await call.write(numbered(1, 5, serial=1, opens=not both.service.opened))
            both.service.opened += 1
            found = (await read(call, 1))[1]
            assert (found.base_length, found.serial, found.led) == (5, 1, 0)
        await call.write(numbered(1, HOLD, serial=2))
        await until(lambda: both.service.messages == [1, 1, 1])
        for is_waiting in (False, True):
            await call.write(numbered(1, HOLD, serial=2))
            assert await read(call, 1) == {1: Pending(2, is_waiting=is_waiting)}
            both.service.waits = True
        both.service.released.set()
        assert (await read(call, 1))[1].serial == 2
        await call.write(numbered(1, DENSE, serial=3))
        first = (await read(call, 1))[1]
        await call.write(numbered(1, DENSE, serial=3))
        assert first.serial == (await read(call, 1))[1].serial == 3
        assert both.service.taken == [5, HOLD, DENSE, DENSE], "dense rows are too large to be kept"
        call.cancel()


async def test_a_step_of_a_sequence_that_is_not_known_says_so() -> None:
    """One that has ended, or whose Open was lost: the coordinator opens it again, here or elsewhere."""
    async with ends() as both:
        call = both.stub.Verify()
        await call.write(numbered(1, LEAVE, serial=1, opens=True))
        assert (await read(call, 1))[1].code is grpc.StatusCode.OK
        for number in (1, 7):
            await call.write(numbered(number, 5, serial=1))
            found = (await read(call, 1))[number]
            assert found.code is grpc.StatusCode.UNAVAILABLE
            assert "is not known here" in found.sentence
        assert both.service.calls["sequences"] == 1
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
        asking((0, 5)).SerializeToString(),
        asking((-1, 5), opens=False).SerializeToString(),
        b"\x0a\x00" * 70_000,
    ],
)
async def test_an_unreadable_message_ends_the_stream_and_its_sequences(content: bytes) -> None:
    async with ends() as both, open_channel(both.address) as channel:
        call: Any = channel.stream_stream("/tandem.v1.TargetService/Verify")()
        await call.write(asking((1, HOLD)).SerializeToString())
        await until(lambda: both.service.running == 1)
        await call.write(content)
        with suppress(grpc.aio.AioRpcError):
            await call.read()
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert both.service.running == 0


async def flood(*lengths: int) -> AsyncIterator[target_pb2.VerifyRequest]:
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
    await until(lambda: service.running == 1)
    for _ in range(100):
        await asyncio.sleep(0)
    assert taken < 20
    service.released.set()  # now the stream is read to its end: the sequence's answers, and its end
    messages = [await waiting, *[response async for response in answers]]
    assert (taken, sum(len(list(answers_from_proto(each))) for each in messages)) == (1000, 1001)


async def test_requests_of_a_sequence_that_has_ended_do_not_block_others() -> None:
    async with asyncio.timeout(SECONDS):
        answers = Echo().Verify(flood(LEAVE, *[HOLD] * 1000), cast("Context", None))
        (ending,) = [
            part.ending async for response in answers for part in response.parts if part.HasField("ending")
        ]
    assert ending.code == 0


class Large(FakeTarget):
    answered = 0

    async def verified(self, tokens: Sequence[int], step: VerifyStep) -> Verification:
        self.answered += 1
        return Verification(0, (DenseRow(np.zeros(1 << 18, np.float32)),))


async def test_answers_to_a_client_that_does_not_read_are_bounded() -> None:
    service = Large()
    answers = service.Verify(flood(*[0] * 100), cast("Context", None))
    assert [part.HasField("verification") for part in (await anext(answers)).parts] == [True]
    for _ in range(200):
        await asyncio.sleep(0)
    assert service.answered < 8
    verified = [part.HasField("verification") async for response in answers for part in response.parts]
    assert sum(verified) == 99
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
        sequence = Asker(replace(both.streams, call=garbling))
        with pytest.raises(ProtocolError, match="target service: its answer cannot be read"):
            await sequence.ask(1)
        sequence.cancel()
