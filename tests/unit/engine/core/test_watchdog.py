"""A step counts as stuck by the time of earlier steps, never because it is large."""

from __future__ import annotations

import pytest

from tandem.engine.core.watchdog import LEAST_SECONDS, MARGIN, MOST_SECONDS, StepWatchdog


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def step(watchdog: StepWatchdog, clock: Clock, tokens: int, seconds: float) -> None:
    watchdog.begin(tokens)
    clock.now += seconds
    watchdog.end()


def test_a_step_that_does_not_end_is_overdue_until_it_ends(clock: Clock) -> None:
    watchdog = StepWatchdog(clock=clock)
    clock.now += 1000.0
    assert watchdog.overdue_seconds == 0.0, "nothing runs"
    watchdog.begin(4)
    clock.now += LEAST_SECONDS
    assert watchdog.overdue_seconds == 0.0
    clock.now += 1.0
    assert watchdog.overdue_seconds == LEAST_SECONDS + 1.0
    watchdog.end()
    assert watchdog.overdue_seconds == 0.0


def test_a_large_step_of_a_slow_model_has_time(clock: Clock) -> None:
    """Warm-up ran one token in a second, so 100 of them may take as many seconds, and then some."""
    watchdog = StepWatchdog(clock=clock)
    step(watchdog, clock, tokens=1, seconds=1.0)
    assert watchdog.bound_seconds(100) == pytest.approx(MARGIN * 100)
    assert watchdog.bound_seconds(10_000) == MOST_SECONDS
    assert watchdog.bound_seconds(1) == LEAST_SECONDS


def test_a_first_step_that_compiles_is_forgotten(clock: Clock) -> None:
    watchdog = StepWatchdog(clock=clock)
    step(watchdog, clock, tokens=1, seconds=20.0)
    assert watchdog.bound_seconds(512) == MOST_SECONDS
    for _ in range(400):
        step(watchdog, clock, tokens=1, seconds=0.01)
    assert watchdog.bound_seconds(512) == LEAST_SECONDS


def test_the_bound_can_be_configured(clock: Clock) -> None:
    watchdog = StepWatchdog(0.5, clock)
    watchdog.begin(512)
    clock.now += 0.6
    assert watchdog.overdue_seconds == pytest.approx(0.6)
