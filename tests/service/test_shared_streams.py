"""Many sequences on one stream do not affect each other."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.transport.streams import DedicatedStream, SequenceStream
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
from tandem.v1 import target_pb2
from tandem.v1.types_pb2 import SequencePart
from target_service.service import TargetService
from target_service.settings import TargetSettings
from tests.paths import DEMO_DRAFT, DEMO_TARGET
from tests.service.clients import until
from tests.service.echo_servicer import FAIL, HOLD, LEAVE, REFUSE, SECONDS, answer_to, ends, step
from tests.service.fakes import serving

FINISH = target_pb2.VerifyRequest(finish=target_pb2.VerifyFinish())


async def test_the_first_sequence_has_a_dedicated_stream_and_others_share_one() -> None:
    async with ends() as both:
        sequences = [both.streams.stream() for _ in range(17)]
        answers = await asyncio.gather(*(answer_to(sequence, i) for i, sequence in enumerate(sequences)))
        assert answers == list(range(17))
        assert both.service.calls == {"sequences": 17, "shared streams": 1}
        for sequence in sequences:
            sequence.cancel()
        await until(lambda: both.service.running == 0, SECONDS)
        alone = both.streams.stream()
        assert isinstance(alone, DedicatedStream), (
            "without other sequences, the next one gets a dedicated stream"
        )
        alone.cancel()


async def test_simultaneous_requests_and_answers_travel_in_one_message() -> None:
    async with ends() as both:
        sequences = both.sequences(16)
        for _ in range(3):
            both.service.messages.clear()
            answers = [asyncio.create_task(answer_to(sequence, HOLD)) for sequence in sequences]
            await until(lambda: sum(both.service.messages) == 16, SECONDS)
            assert len(both.service.messages) == 1
            both.service.released.set()
            await asyncio.gather(*answers)
            both.service.released.clear()


async def test_a_shared_stream_counts_the_same_bytes_as_a_dedicated_one() -> None:
    async with ends() as both:
        alone, shared = Traffic(), Traffic()
        for traffic in (alone, shared):
            sequence = both.streams.stream(traffic)
            await answer_to(sequence, 7)
            await answer_to(sequence, 300)
        sent = len(step(7).SerializeToString()) + len(step(300).SerializeToString())
        received = sum(
            len(target_pb2.VerifyResponse(base_length=length).SerializeToString()) for length in (7, 300)
        )
        assert alone == shared == Traffic(sent, received, 2, 2)


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
        assert await answer_to(first, 1) == await answer_to(second, 1) == 1
        with pytest.raises(error, match=sentence):
            await answer_to(first, length)
        with pytest.raises(error, match=sentence):
            await answer_to(first, 2)
        assert await answer_to(second, 3) == 3
        assert both.service.calls["sequences"] == 2, "a late request must not begin a sequence"
        first.cancel()
        assert await answer_to(second, 4) == 4


async def test_a_cancelled_sequence_stops_at_once_and_no_other_does() -> None:
    async with ends() as both:
        first, second = both.sequences(2)
        assert await answer_to(second, 1) == 1
        held = asyncio.create_task(answer_to(first, HOLD))
        await until(lambda: both.service.running == 2, SECONDS)
        first.cancel()
        first.cancel()
        await until(lambda: both.service.running == 1, SECONDS)
        assert await answer_to(second, 2) == 2
        for late in (held, answer_to(first, 3)):
            with pytest.raises(ServiceUnavailableError):
                await late


async def test_finish_returns_after_the_sequence_has_ended() -> None:
    async with ends() as both:
        first, second = both.sequences(2)
        await answer_to(first, 1)
        held = asyncio.create_task(answer_to(second, HOLD))
        await first.finish(FINISH)
        assert (both.service.finished, both.service.running) == (1, 1)
        both.service.released.set()
        assert await held == HOLD


async def test_a_broken_stream_ends_its_sequences_and_later_ones_get_a_new_stream() -> None:
    async with ends() as both:
        sequences = both.sequences(3)
        held = [asyncio.create_task(answer_to(sequence, HOLD)) for sequence in sequences]
        await until(lambda: both.service.running == 3, SECONDS)
        await both.server.stop(None)
        for each in held:
            with pytest.raises(ServiceUnavailableError):
                await each
        assert all(sequence.was_sent for sequence in sequences)
        last = both.streams.stream()
        with pytest.raises(ServiceUnavailableError):
            await answer_to(last, 1)
        assert not last.was_sent, "nobody was there"


async def test_an_old_stream_accepts_no_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ends() as both:
        monkeypatch.setattr("coordinator.transport.streams._MAX_SECONDS", 0.0)
        first, second = both.sequences(2)
        assert await answer_to(first, 1) == 1
        assert await answer_to(second, 2) == 2
        assert await answer_to(first, 3) == 3
        assert both.service.calls["shared streams"] == 2


async def test_a_draining_server_accepts_no_sequence_and_ends_none() -> None:
    readiness, calls = ReadinessInterceptor(""), RunningCalls()
    async with ends() as both:
        both.service.shared.apply_limits(readiness, calls, max_calls=2)
        first, second, third = both.sequences(3)
        held = [asyncio.create_task(answer_to(sequence, HOLD)) for sequence in (first, second)]
        await until(lambda: both.service.running == 2, SECONDS)
        with pytest.raises(CapacityError, match="2 calls run already, which is the most; try again"):
            await answer_to(third, 1)
        readiness.closed_because = "the target service is draining"
        late = both.streams.stream()
        with pytest.raises(ServiceUnavailableError, match="the target service is draining"):
            await answer_to(late, 1)
        assert not await calls.end(0.01), "a drain waits for running sequences"
        both.service.released.set()
        assert await asyncio.gather(*held) == [HOLD, HOLD]
        calls.cut_off("it has drained for as long as it may")
        with pytest.raises(ServiceUnavailableError, match="for as long as it may"):
            await answer_to(first, 2)


ACTS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["ask", "hold", "finish", "drop", "refuse"])), max_size=40
)


async def done(act: str, sequence: SequenceStream[target_pb2.VerifyResponse], base_length: int) -> bool:
    """Apply the action to a sequence; return True if it is usable afterwards."""
    match act:
        case "ask":
            assert await answer_to(sequence, base_length) == base_length
        case "hold":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await answer_to(sequence, HOLD)
            sequence.cancel()
        case "finish":
            await sequence.finish(FINISH)
        case "drop":
            sequence.cancel()
        case _:
            with pytest.raises(CapacityError):
                await answer_to(sequence, REFUSE)
    return act == "ask"


@given(acts=ACTS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
async def test_each_sequence_gets_its_own_answers_whatever_others_do(acts: list[tuple[int, str]]) -> None:
    async with ends() as both:
        sequences = [both.streams.stream() for _ in range(6)]

        async def run_sequence(own: int) -> None:
            is_of_use = True
            for turn, (number, act) in enumerate(acts):
                if number == own and is_of_use:
                    is_of_use = await done(act, sequences[own], 10 * turn + own)
            if is_of_use:
                assert await answer_to(sequences[own], own) == own
            sequences[own].cancel()

        await asyncio.gather(*map(run_sequence, range(6)))
        await until(lambda: both.service.running == 0, SECONDS)


@pytest.mark.parametrize("role", ["target", "draft"])
async def test_a_services_readiness_applies_to_its_shared_streams(role: str) -> None:
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
        method = {"target": "TargetService/VerifyMany", "draft": "DraftService/ProposeMany"}[role]
        call: Any = channel.stream_stream(f"/tandem.v1.{method}")()
        part = SequencePart(sequence=1, message=FINISH.SerializeToString())
        await call.write(target_pb2.VerifyManyRequest(parts=[part]).SerializeToString())
        (answer,) = target_pb2.VerifyManyResponse.FromString(await call.read()).parts
        assert answer.end.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert answer.end.message == "it is closed"
        call.cancel()
