"""A target counts as hung by the time of its earlier answers, never because it is busy."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise

import pytest

from tandem.errors import ServiceUnavailableError, TandemError
from tandem.model.types import Pending
from tandem_coordinator.replicas.hangs import (
    MARGIN,
    MIN_SECONDS,
    SILENT_SECONDS,
    UNLEARNT_SECONDS,
    UNLEARNT_SECONDS_PER_TOKEN,
    FadingMaximum,
    UnansweredSteps,
    VerificationTimes,
)
from tandem_coordinator.transport.target_client import ASK_AGAIN_SECONDS
from tests.unit.coordinator.stats.test_speculation import Clock


@dataclass
class FakeSequence:
    """Counts how often it was asked to ask again."""

    pending: Pending | None = None
    unwritten: int = 0
    asked: int = 0
    answer: asyncio.Future[None] | None = None

    def ask_again(self) -> None:
        self.pending = None
        self.asked += 1

    async def answered(self) -> None:
        """Never, but by an error."""
        self.answer = asyncio.get_running_loop().create_future()
        await self.answer

    def fail(self, error: TandemError) -> None:
        assert self.answer is not None
        if not self.answer.done():
            self.answer.set_exception(error)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def steps(clock: Clock) -> UnansweredSteps:
    return UnansweredSteps(learnt(clock), clock)


def learnt(clock: Clock, step_seconds: float = 0.1) -> VerificationTimes:
    """Of a target that takes 0.01 s for a token of a prompt."""
    times = VerificationTimes()
    times.add(5, step_seconds, clock.now)
    times.add(1000, 1000 * 0.01, clock.now)
    return times


def test_a_slow_answer_is_gradually_forgotten() -> None:
    slowest = FadingMaximum()
    assert slowest.value is None
    slowest.add(8.0, 0.0)
    slowest.add(1.0, 60.0)
    assert slowest.value == pytest.approx(4.0)
    slowest.add(5.0, 60.0)
    assert slowest.value == pytest.approx(5.0)


def test_before_the_first_answers_the_bound_is_minutes() -> None:
    """A large model on a slow machine may take minutes for a prompt."""
    times = VerificationTimes()
    assert times.bound_seconds(0) == UNLEARNT_SECONDS
    assert times.bound_seconds(600) == UNLEARNT_SECONDS + 600 * UNLEARNT_SECONDS_PER_TOKEN


def test_the_bound_follows_the_slowest_answers(clock: Clock) -> None:
    assert learnt(clock).bound_seconds(0) == MIN_SECONDS, "a fast machine may still have a hiccup"
    assert learnt(clock, step_seconds=5.0).bound_seconds(0) == pytest.approx(MARGIN * 5.0)
    assert learnt(clock).bound_seconds(500) == pytest.approx(MIN_SECONDS + MARGIN * 0.01 * 500)
    assert VerificationTimes(3.0).bound_seconds(10_000) == 3.0


def test_a_target_that_answers_nothing_is_hung_for_all(clock: Clock, steps: UnansweredSteps) -> None:
    old = steps.begin(FakeSequence(), 5, is_first=False)
    clock.now += MIN_SECONDS
    young = steps.begin(FakeSequence(), 5, is_first=False)
    assert not steps.overdue()
    clock.now += 0.1
    assert not steps.overdue(more_seconds=1.0)
    assert steps.overdue() == {old, young}
    steps.answered(old)
    assert not steps.overdue()


def test_a_target_that_answers_others_is_hung_for_one_step_only(clock: Clock, steps: UnansweredSteps) -> None:
    late = steps.begin(FakeSequence(), 5, is_first=False)
    clock.now += MIN_SECONDS - 0.1
    other = steps.begin(FakeSequence(), 5, is_first=False)
    assert not steps.overdue()
    clock.now += 0.2
    steps.answered(other)
    assert list(steps.overdue()) == [late]


def test_a_step_that_waits_for_room_may_wait_as_long_as_others_are_answered(
    clock: Clock, steps: UnansweredSteps
) -> None:
    """The target says so when it is asked again."""
    sequence = FakeSequence()
    waiting = steps.begin(sequence, 5, is_first=False)
    for _ in range(100):
        clock.now += MIN_SECONDS - 0.1
        steps.answered(steps.begin(FakeSequence(), 5, is_first=False))
        steps.ask_again()
        sequence.pending = Pending(1, is_waiting=True)
        assert not steps.overdue()
    clock.now += MIN_SECONDS + 0.1
    steps.ask_again()
    assert list(steps.overdue()) == [waiting], "nobody is answered any more"


def test_an_answer_is_asked_for_again_now_and_then(clock: Clock, steps: UnansweredSteps) -> None:
    sequence = FakeSequence()
    steps.begin(sequence, 5, is_first=True)
    asked: list[float] = []
    for i in range(400):
        clock.now += 0.1
        steps.heard(clock.now)
        steps.ask_again()
        sequence.pending = Pending(1, is_waiting=False)
        if sequence.asked > len(asked):
            asked.append(round(0.1 * (i + 1), 1))
    assert asked[:3] == [2.0, 4.0, 6.0]
    gaps = [later - earlier for earlier, later in pairwise(asked)]
    assert all(gap <= max(ASK_AGAIN_SECONDS, when / 2) + 0.11 for gap, when in zip(gaps, asked, strict=False))
    assert not steps.lost()


def test_a_target_that_says_nothing_of_a_step_has_lost_it(clock: Clock, steps: UnansweredSteps) -> None:
    sequence = FakeSequence()
    step = steps.begin(sequence, 5, is_first=True)
    clock.now += ASK_AGAIN_SECONDS
    steps.ask_again()
    clock.now += SILENT_SECONDS + 0.1
    steps.heard(clock.now - SILENT_SECONDS)
    assert not steps.lost(), "it may be the connection, or the whole target"
    steps.heard(clock.now)
    assert list(steps.lost()) == [step]
    sequence.pending = Pending(1, is_waiting=False)
    steps.ask_again()
    assert not steps.lost()


def test_a_question_that_is_not_written_yet_is_not_lost(clock: Clock, steps: UnansweredSteps) -> None:
    sequence = FakeSequence(unwritten=1)
    step = steps.begin(sequence, 5, is_first=True)
    clock.now += ASK_AGAIN_SECONDS
    for _ in range(5):
        steps.ask_again()
        clock.now += SILENT_SECONDS
        steps.heard(clock.now)
        assert not steps.lost()
    steps.ask_again()
    sequence.unwritten = 0
    clock.now += SILENT_SECONDS + 0.1
    steps.heard(clock.now)
    assert list(steps.lost()) == [step]


def test_an_answer_that_was_lost_does_not_raise_the_bound(clock: Clock) -> None:
    times = learnt(clock)
    steps = UnansweredSteps(times, clock)
    bound = times.bound_seconds(0)
    step = steps.begin(FakeSequence(), 5, is_first=False)
    clock.now += ASK_AGAIN_SECONDS
    steps.ask_again()
    clock.now += 5.0
    steps.answered(step)
    assert times.bound_seconds(0) <= bound


def test_a_fixed_bound_holds_for_each_step(clock: Clock) -> None:
    steps = UnansweredSteps(VerificationTimes(fixed_seconds=3.0), clock)
    late = steps.begin(FakeSequence(), 5, is_first=False)
    clock.now += 2.9
    steps.answered(steps.begin(FakeSequence(), 5, is_first=False))
    assert not steps.overdue()
    clock.now += 0.2
    assert list(steps.overdue()) == [late]


def test_a_wait_for_pages_does_not_raise_the_bound(clock: Clock) -> None:
    times = learnt(clock)
    steps = UnansweredSteps(times, clock)
    sequence = FakeSequence()
    waiting = steps.begin(sequence, 5, is_first=False)
    bound = times.bound_seconds(0)
    clock.now += ASK_AGAIN_SECONDS
    steps.ask_again()
    sequence.pending = Pending(1, is_waiting=True)
    steps.answered(steps.begin(FakeSequence(), 5, is_first=False))
    clock.now += 40.0
    steps.answered(waiting)
    assert times.bound_seconds(0) <= bound


def test_the_first_step_may_wait_while_others_are_answered(clock: Clock, steps: UnansweredSteps) -> None:
    steps.begin(FakeSequence(), 20, is_first=True)
    for _ in range(100):
        clock.now += MIN_SECONDS - 0.1
        steps.answered(steps.begin(FakeSequence(), 5, is_first=False))
        assert not steps.overdue()


def test_the_first_answer_may_wait_for_the_prompts_of_all(clock: Clock, steps: UnansweredSteps) -> None:
    for _ in range(10):
        steps.begin(FakeSequence(), 1000, is_first=True)
    clock.now += MIN_SECONDS + MARGIN * 0.01 * 10_000 - 0.1
    assert not steps.overdue()
    clock.now += 0.2
    assert len(steps.overdue()) == 10


async def waited(steps: UnansweredSteps, until: float | None = None) -> str:
    """Wait for an answer that never comes."""
    sequence = FakeSequence()
    try:
        await steps.wait(sequence.answered(), sequence, 5, is_first=False, until=until)
    except asyncio.CancelledError:
        return "cancelled"
    except ServiceUnavailableError as error:
        return str(error)
    return "answered"


async def test_a_wait_is_given_up_once(clock: Clock, steps: UnansweredSteps) -> None:
    waiting = asyncio.create_task(waited(steps))
    await asyncio.sleep(0)
    clock.now += MIN_SECONDS + 1.0
    assert not steps.overdue(more_seconds=30.0), "without another target a sequence stays longer"
    steps.give_up(steps.overdue())
    assert not steps.overdue()
    assert await waiting == "target service: no answer to a verification within 11 s"


async def test_a_wait_ends_at_its_own_moment(steps: UnansweredSteps) -> None:
    """Of a sequence that moves, which may stay where it is."""
    until = asyncio.get_running_loop().time() + 0.01
    assert (await waited(steps, until)).startswith("target service: no answer to a verification within")


@pytest.mark.parametrize("is_silent", [False, True])
async def test_a_wait_that_its_own_request_cancels_is_not_given_up(
    *, is_silent: bool, clock: Clock, steps: UnansweredSteps
) -> None:
    waiting = asyncio.create_task(waited(steps))
    await asyncio.sleep(0)
    if is_silent:
        clock.now += MIN_SECONDS + 1.0
        steps.give_up(steps.overdue())
    waiting.cancel()
    assert await waiting == "cancelled", "the request's own cancellation goes on"
