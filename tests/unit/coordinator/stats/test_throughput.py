"""Tokens per second over the last seconds."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.stats.throughput import TokenCounter


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_new_counter_has_rate_zero() -> None:
    clock = Clock()
    counter = TokenCounter(clock)
    assert counter.rate(10) == 0.0
    clock.now += 5
    assert counter.rate(10) == 0.0


def test_a_young_counter_divides_by_its_age() -> None:
    clock = Clock()
    counter = TokenCounter(clock)
    counter.add(30)
    clock.now += 3
    assert counter.rate(10) == pytest.approx(10.0)


def test_a_steady_flow_has_the_same_rate_over_any_time() -> None:
    clock = Clock()
    counter = TokenCounter(clock)
    for _ in range(130 * 4):
        clock.now += 0.25
        counter.add(5)
    assert counter.rate(10) == pytest.approx(20.0, rel=0.06)
    assert counter.rate(60) == pytest.approx(20.0, rel=0.02)
    assert counter.total == 130 * 4 * 5


def test_tokens_before_the_interval_do_not_count() -> None:
    clock = Clock()
    counter = TokenCounter(clock)
    counter.add(600)
    clock.now += 30.5
    assert counter.rate(10) == 0.0
    assert counter.rate(60) == pytest.approx(600 / 30.5)
    clock.now += 60
    assert counter.rate(60) == 0.0
    assert counter.total == 600


@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(0, 50)), max_size=60), st.sampled_from([10, 60]))
def test_the_rate_equals_that_of_a_full_record(steps: list[tuple[float, int]], seconds: int) -> None:
    clock = Clock()
    counter = TokenCounter(clock)
    record: deque[tuple[int, int]] = deque()
    for pause, count in steps:
        clock.now += pause
        counter.add(count)
        record.append((int(clock.now - 1000.0), count))
    now = clock.now - 1000.0
    oldest = max(int(now) - seconds + 1, 0)
    expected = sum(count for second, count in record if second >= oldest)
    if now > oldest:
        assert counter.rate(seconds) * (now - oldest) == pytest.approx(expected)
