"""Many sequences on one stream do not affect each other."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draft_service.service import DraftService
from draft_service.settings import DraftSettings
from tandem.errors import (
    CapacityError,
    ProtocolError,
    ServiceUnavailableError,
    TandemError,
)
from tandem.rpc.channels import Traffic, open_channel
from tandem.serving.interceptors import ReadinessInterceptor, RunningCalls
from tandem.types import DraftOptions, SamplingParams
from tandem.v1 import draft_pb2, target_pb2
from tandem.wire import draft as draft_wire
from target_service.service import TargetService
from target_service.settings import TargetSettings
from tests.paths import DEMO_DRAFT, DEMO_TARGET
from tests.service.clients import until
from tests.service.echo_servicer import FAIL, HOLD, LEAVE, REFUSE, SECONDS, Asker, asking, ends
from tests.service.fakes import serving


async def test_all_sequences_share_a_stream_that_ends_with_the_last() -> None:
    async with ends() as both:
        sequences = both.sequences(17)
        answers = await asyncio.gather(*(sequence.ask(i) for i, sequence in enumerate(sequences)))
        assert answers == list(range(17))
        assert both.service.calls == {"sequences": 17, "streams": 1}
        for sequence in sequences:
            sequence.stream.cancel()
        await until(lambda: both.service.running == 0, SECONDS)
        (later,) = both.sequences(1)
        assert await later.ask(1) == 1
        assert both.service.calls["streams"] == 2
        later.stream.cancel()


async def test_simultaneous_requests_and_answers_travel_in_one_message() -> None:
    async with ends() as both:
        sequences = both.sequences(16)
        for _ in range(3):
            both.service.messages.clear()
            answers = [asyncio.create_task(sequence.ask(HOLD)) for sequence in sequences]
            await until(lambda: sum(both.service.messages) == 16, SECONDS)
            assert len(both.service.messages) == 1
            both.service.released.set()
            await asyncio.gather(*answers)
            both.service.released.clear()


async def test_bytes_are_counted() -> None:
    async with ends() as both:
        traffic = Traffic()
        sequence = Asker(both.streams, traffic)
        await sequence.ask(7)
        await sequence.ask(300)
        assert (traffic.sent_messages, traffic.received_messages) == (3, 2)
        assert 30 < traffic.sent_bytes < 300
        assert 20 < traffic.received_bytes < 200
        sequence.stream.cancel()


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
        first.stream.cancel()
        assert await second.ask(4) == 4


async def test_a_cancelled_sequence_stops_at_once_and_no_other_does() -> None:
    async with ends() as both:
        first, second = both.sequences(2)
        assert await second.ask(1) == 1
        held = asyncio.create_task(first.ask(HOLD))
        await until(lambda: both.service.running == 2, SECONDS)
        first.stream.cancel()
        first.stream.cancel()
        await until(lambda: both.service.running == 1, SECONDS)
        assert await second.ask(2) == 2
        for late in (held, first.ask(3)):
            with pytest.raises(ServiceUnavailableError):
                await late


async def test_finish_returns_after_the_sequence_has_ended() -> None:
    async with ends() as both:
        first, second = both.sequences(2)
        await first.ask(1)
        held = asyncio.create_task(second.ask(HOLD))
        await first.stream.finish(0)
        assert (both.service.finished, both.service.running) == (1, 1)
        both.service.released.set()
        assert await held == HOLD


async def test_a_broken_stream_ends_its_sequences_and_later_ones_get_a_new_stream() -> None:
    async with ends() as both:
        sequences = both.sequences(3)
        held = [asyncio.create_task(sequence.ask(HOLD)) for sequence in sequences]
        await until(lambda: both.service.running == 3, SECONDS)
        await both.server.stop(None)
        for each in held:
            with pytest.raises(ServiceUnavailableError):
                await each
        assert all(sequence.stream.was_sent for sequence in sequences)
        last = Asker(both.streams)
        with pytest.raises(ServiceUnavailableError):
            await last.ask(1)
        assert not last.stream.was_sent, "nobody was there"


async def test_an_old_stream_accepts_no_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ends() as both:
        monkeypatch.setattr("coordinator.transport.streams._MAX_SECONDS", 0.0)
        first, second = both.sequences(2)
        assert await first.ask(1) == 1
        assert await second.ask(2) == 2
        assert await first.ask(3) == 3
        assert both.service.calls["streams"] == 2


async def test_a_draining_server_accepts_no_sequence_and_ends_none() -> None:
    readiness, calls = ReadinessInterceptor(""), RunningCalls()
    async with ends() as both:
        both.service.streams.apply_limits(readiness, calls, max_calls=2)
        first, second, third = both.sequences(3)
        held = [asyncio.create_task(sequence.ask(HOLD)) for sequence in (first, second)]
        await until(lambda: both.service.running == 2, SECONDS)
        with pytest.raises(CapacityError, match="2 calls run already, which is the most; try again"):
            await third.ask(1)
        readiness.closed_because = "the target service is draining"
        late = Asker(both.streams)
        with pytest.raises(ServiceUnavailableError, match="the target service is draining"):
            await late.ask(1)
        assert not await calls.end(0.01), "a drain waits for running sequences"
        both.service.released.set()
        assert await asyncio.gather(*held) == [HOLD, HOLD]
        calls.cut_off("it has drained for as long as it may")
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
            sequence.stream.cancel()
        case "finish":
            await sequence.stream.finish(0)
        case "drop":
            sequence.stream.cancel()
        case _:
            with pytest.raises(CapacityError):
                await sequence.ask(REFUSE)
    return act == "ask"


@given(acts=ACTS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
            sequences[own].stream.cancel()

        await asyncio.gather(*map(run_sequence, range(6)))
        await until(lambda: both.service.running == 0, SECONDS)


@pytest.mark.parametrize("role", ["target", "draft"])
async def test_a_services_readiness_applies_to_its_sequences(role: str) -> None:
    """Otherwise the fault would be masked: sequences that a drain cuts off continue elsewhere."""
    service: Any = (
        TargetService(TargetSettings(model=DEMO_TARGET))
        if role == "target"
        else DraftService(DraftSettings(model=DEMO_DRAFT))
    )
    service.open_other_endpoints(ReadinessInterceptor("it is closed"), RunningCalls())
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
        (end,) = response.FromString(await call.read()).ends
        assert end.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert end.message == "it is closed"
        call.cancel()
