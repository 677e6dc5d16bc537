"""A target counts as hung by the time of its earlier answers, never because it is busy."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.replicas.hangs import (
    MARGIN,
    MIN_SECONDS,
    UNLEARNT_SECONDS,
    UNLEARNT_SECONDS_PER_TOKEN,
    FadingMaximum,
    UnansweredSteps,
    VerificationTimes,
)
from tandem.errors import ServiceUnavailableError
from tests.unit.coordinator.stats.test_speculation import Clock


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
    old = steps.begin(5, is_first=False)
    clock.now += MIN_SECONDS
    young = steps.begin(5, is_first=False)
    assert not steps.overdue()
    clock.now += 0.1
    assert not steps.overdue(more_seconds=1.0)
    assert steps.overdue() == {old, young}
    steps.answered(old)
    assert not steps.overdue()


def test_a_target_that_answers_others_is_hung_for_one_step_only(clock: Clock, steps: UnansweredSteps) -> None:
    late = steps.begin(5, is_first=False)
    for _ in range(6):
        clock.now += MIN_SECONDS
        assert not steps.overdue(), "its pages may have gone to others"
        steps.answered(steps.begin(5, is_first=False))
    clock.now += MIN_SECONDS - 0.1
    other = steps.begin(5, is_first=False)
    clock.now += 0.2
    steps.answered(other)
    assert list(steps.overdue()) == [late]


def test_a_fixed_bound_holds_for_each_step(clock: Clock) -> None:
    steps = UnansweredSteps(VerificationTimes(fixed_seconds=3.0), clock)
    late = steps.begin(5, is_first=False)
    clock.now += 2.9
    steps.answered(steps.begin(5, is_first=False))
    assert not steps.overdue()
    clock.now += 0.2
    assert list(steps.overdue()) == [late]


def test_a_wait_for_pages_does_not_raise_the_bound(clock: Clock) -> None:
    times = learnt(clock)
    steps = UnansweredSteps(times, clock)
    waiting = steps.begin(5, is_first=False)
    bound = times.bound_seconds(0)
    clock.now += 1.0
    steps.answered(steps.begin(5, is_first=False))
    clock.now += 40.0
    steps.answered(waiting)
    assert times.bound_seconds(0) <= bound


def test_the_first_step_may_wait_while_others_are_answered(clock: Clock, steps: UnansweredSteps) -> None:
    steps.begin(20, is_first=True)
    for _ in range(100):
        clock.now += MIN_SECONDS - 0.1
        steps.answered(steps.begin(5, is_first=False))
        assert not steps.overdue()


def test_the_first_answer_may_wait_for_the_prompts_of_all(clock: Clock, steps: UnansweredSteps) -> None:
    for _ in range(10):
        steps.begin(1000, is_first=True)
    clock.now += MIN_SECONDS + MARGIN * 0.01 * 10_000 - 0.1
    assert not steps.overdue()
    clock.now += 0.2
    assert len(steps.overdue()) == 10


async def waited(steps: UnansweredSteps) -> str:
    """Wait for an answer that never comes."""
    try:
        await steps.wait(asyncio.Event().wait(), 5, is_first=False)
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
