"""While a device runs a step, the host does what does not depend on it. The test says when the device's steps end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest

from benchmarks.device_idle import LEAD, PROMPT, PROPOSED, StandInHead, StandInModel
from tandem.engine.core.engine import RowEngine
from tandem.engine.interface import EngineSettings, RowRequest
from tandem.engine.kv_cache.sequence import Sequence
from tandem.model.types import (
    AcceptanceTerms,
    Cancel,
    Delta,
    Finish,
    LogitAdjustments,
    RowKind,
    SamplingParams,
    TargetOptions,
    Verification,
    VerifyStep,
)
from tandem.v1.target_pb2_grpc import TargetServiceStub
from tandem.wire import target as wire
from tandem.wire.status import Ending
from tandem_target.servicer import TargetServicer
from tandem_target.verifier import Verifier
from tests.service.clients import until
from tests.service.fakes import HANG_SECONDS, serving
from tests.unit.engine.greedy import settle, started

ALL = 1 << 30
OPTIONS = TargetOptions(
    "a request",
    SamplingParams(0.0),
    1000,
    prompt_length=len(PROMPT),
    acceptance=AcceptanceTerms("greedy"),
)
LED = VerifyStep(Delta(0, PROMPT), RowKind.TOKEN, 1, lead=LEAD, own_tokens=PROPOSED)
"""Behind it a sequence goes on by itself."""
LED_ALONE = VerifyStep(Delta(0, PROMPT), RowKind.TOKEN, 1, lead=LEAD)
"""Behind it a sequence goes on by itself, without a proposal."""
ALONE = VerifyStep(Delta(0, PROMPT), RowKind.TOKEN, 1)


class HeldDevice:
    """A device whose steps are launched and end only as far as a test lets them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._may_launch = ALL
        self._may_end = 0
        self.reached = 0
        """Steps that the host wanted to launch."""
        self.batches: list[int] = []
        """Sequences of each step that was launched."""
        self.awaited = 0
        """The last step that the host waited for."""
        self.fails_launch = 0
        self.fails_end = 0
        """Step that fails there; 0: none."""

    def let_launch(self, steps: int) -> None:
        """Let so many steps be launched in all."""
        with self._changed:
            self._may_launch = steps
            self._changed.notify_all()

    def let_end(self, steps: int) -> None:
        """Let so many steps end in all."""
        with self._changed:
            self._may_end = steps
            self._changed.notify_all()

    def launch(self, sequence_count: int) -> None:
        """See `benchmarks.device_idle.Device`."""
        with self._changed:
            self.reached += 1
            assert self._changed.wait_for(lambda: self.reached <= self._may_launch, HANG_SECONDS)
            if self.reached == self.fails_launch:
                raise RuntimeError("the device does not begin")
            self.batches.append(sequence_count)

    def wait(self) -> None:
        """See `benchmarks.device_idle.Device`."""
        with self._changed:
            self.awaited = self.reached
            assert self._changed.wait_for(lambda: self.reached <= self._may_end, HANG_SECONDS)
            if self.reached == self.fails_end:
                raise RuntimeError("the device fails")


class NotingEngine(RowEngine):
    """Notes the steps that it is asked for."""

    def __init__(self, device: HeldDevice) -> None:
        super().__init__(StandInModel(device), EngineSettings(max_sequences=8), drafter=StandInHead())
        self.asked: list[VerifyStep] = []

    async def run(self, sequence: Sequence, request: RowRequest) -> Verification:
        self.asked.append(request.step)
        return await super().run(sequence, request)


@dataclass
class Coordinator:
    """Says what a test wants, and keeps what it hears."""

    device: HeldDevice
    engine: NotingEngine
    stream: Any
    heard: list[tuple[int, Any]] = field(default_factory=list)

    async def say(self, *requests: tuple[int, Any]) -> None:
        await self.stream.write(wire.requests_to_proto(requests))

    async def listen(self) -> None:
        while (message := await self.stream.read()) is not grpc.aio.EOF:
            self.heard += wire.answers_from_proto(message)

    def answers(self, sequence: int) -> list[int]:
        """The base lengths of a sequence's answers."""
        return [
            said.base_length
            for number, said in self.heard
            if number == sequence and isinstance(said, wire.Answer)
        ]

    def endings(self, sequence: int) -> list[Ending]:
        return [said for number, said in self.heard if number == sequence and isinstance(said, Ending)]

    async def reach(self, step: int) -> None:
        """Until the host waits for a step of the device."""
        await until(lambda: self.device.awaited == step, HANG_SECONDS)


@asynccontextmanager
async def coordinating() -> AsyncIterator[Coordinator]:
    """A coordinator's stream to a target over a held device."""
    device = HeldDevice()
    servicer = TargetServicer()
    async with asyncio.timeout(HANG_SECONDS), started(NotingEngine(device)) as engine:
        servicer.verifier = Verifier(engine, [], own_head=StandInHead())
        async with serving(servicer) as (address, _), grpc.aio.insecure_channel(address) as channel:
            own = Coordinator(device, engine, TargetServiceStub(channel).Verify())
            listening = asyncio.create_task(own.listen())
            try:
                yield own
            finally:
                device.let_launch(ALL)
                device.let_end(ALL)
                listening.cancel()


async def test_the_answers_of_a_step_leave_while_the_next_one_runs() -> None:
    async with coordinating() as own:
        await own.say((1, OPTIONS), (1, LED_ALONE))
        await own.reach(1)
        own.device.let_launch(1)
        own.device.let_end(1)
        await until(lambda: own.device.reached == 2, HANG_SECONDS)
        await asyncio.sleep(0.05)
        assert not own.heard, "the event loop works while the device has nothing to do"
        own.device.let_launch(ALL)
        await until(lambda: own.answers(1) == [len(PROMPT)], HANG_SECONDS)
        assert own.device.awaited == 2, "the second step has not ended"


async def test_answers_leave_before_a_head_drafts_behind_them() -> None:
    async with coordinating() as own:
        await own.say((1, OPTIONS), (1, LED))
        await own.reach(1)
        own.device.let_launch(1)
        own.device.let_end(1)
        await until(lambda: bool(own.heard), HANG_SECONDS)
        assert own.answers(1) == [len(PROMPT)]
        assert own.device.batches == [1], "the step of what is drafted is not launched"


async def test_answers_that_nothing_follows_leave_at_once() -> None:
    async with coordinating() as own:
        own.device.let_end(ALL)
        await own.say((1, OPTIONS), (1, ALONE))
        await until(lambda: own.answers(1) == [len(PROMPT)], HANG_SECONDS)
        assert own.device.batches == [1]


async def test_what_comes_while_a_step_runs_is_read_and_checked_meanwhile() -> None:
    wrong = TargetOptions("wrong", SamplingParams(0.0), 1000, adjustments=LogitAdjustments({1 << 20: 1.0}))
    async with coordinating() as own:
        await own.say((1, OPTIONS), (1, ALONE))
        await own.reach(1)
        await own.say((2, wrong), (2, ALONE), (3, OPTIONS), (3, ALONE), (4, OPTIONS), (4, ALONE))
        await until(lambda: len(own.engine.asked) == 3, HANG_SECONDS)
        await until(lambda: bool(own.endings(2)), HANG_SECONDS)
        assert own.device.batches == [1]
        assert not own.answers(1)
        own.device.let_end(ALL)
        await until(lambda: bool(own.answers(3) and own.answers(4)), HANG_SECONDS)
        assert own.device.batches == [1, 2]


@pytest.mark.parametrize("place", ["launch", "end"])
async def test_a_step_that_fails_takes_no_other_along(place: str) -> None:
    """Neither the answers of the one before nor the steps that have come meanwhile."""
    async with coordinating() as own:
        setattr(own.device, f"fails_{place}", 2)
        await own.say((1, OPTIONS), (1, LED))
        await own.reach(1)
        await own.say((2, OPTIONS), (2, ALONE))
        await until(lambda: len(own.engine.asked) == 2, HANG_SECONDS)
        own.device.let_launch(1)
        own.device.let_end(1)
        await until(lambda: own.device.reached == 2, HANG_SECONDS)
        await own.say((3, OPTIONS), (3, ALONE))
        await until(lambda: len(own.engine.asked) == 3, HANG_SECONDS)
        own.device.let_launch(ALL)
        own.device.let_end(ALL)
        await until(lambda: bool(own.endings(1) and own.endings(2) and own.answers(3)), HANG_SECONDS)
        assert own.answers(1) == [len(PROMPT)]
        assert not own.answers(2), "it was in the step that failed"
        await own.say((3, Finish(len(PROMPT))))
        await until(lambda: bool(own.endings(3)), HANG_SECONDS)
        await settle(own.engine)


async def test_a_sequence_is_cancelled_while_its_next_step_runs() -> None:
    async with coordinating() as own:
        await own.say((1, OPTIONS), (1, LED), (2, OPTIONS), (2, LED))
        await own.reach(1)
        own.device.let_end(1)
        await own.reach(2)
        await until(lambda: bool(own.answers(1) and own.answers(2)), HANG_SECONDS)
        await own.say((1, Cancel()))
        await asyncio.sleep(0.05)
        assert own.engine.usage.sequence_count == 2, "the step in progress still writes there"
        own.device.let_end(ALL)
        await until(lambda: len(own.answers(2)) == 1 + LEAD, HANG_SECONDS)
        first = len(PROMPT)
        assert own.answers(2) == [first, *(first + 1 + (PROPOSED + 1) * step for step in range(LEAD))]
        assert own.answers(1) == [first]
        assert own.device.batches == [2, 2, *[1] * (LEAD - 1)]
        await own.say((2, Finish(len(PROMPT))))
        await until(lambda: bool(own.endings(2)), HANG_SECONDS)
        await settle(own.engine)


async def test_a_target_stops_while_a_step_runs() -> None:
    async with coordinating() as own:
        await own.say((1, OPTIONS), (1, LED), (2, OPTIONS))
        await own.reach(1)
        own.device.let_end(1)
        await own.reach(2)
        await own.say((2, ALONE))
        await until(lambda: len(own.engine.asked) == 2, HANG_SECONDS)
        closing = asyncio.create_task(own.engine.close())
        await asyncio.sleep(0)
        own.device.let_end(ALL)
        await closing
        await until(lambda: bool(own.endings(1) and own.endings(2)), HANG_SECONDS)
        assert own.answers(1)[0] == len(PROMPT)
        assert not own.answers(2)
