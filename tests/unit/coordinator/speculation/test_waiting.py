"""A round waits for tokens that bring more than their wait costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.speculation.waiting import Unfinished, tokens_after_hit, tokens_after_miss

EXPECTED = [1.0, 1.75, 2.3, 2.7, 3.0]


@pytest.mark.parametrize(
    ("draft_ms", "tokens_per_second", "count"), [(0.1, 300.0, 4), (1.2, 300.0, 3), (4.0, 300.0, 0)]
)
def test_a_round_asks_after_a_miss_for_as_many_tokens_as_pay(
    draft_ms: float, tokens_per_second: float, count: int
) -> None:
    found = tokens_after_miss(
        EXPECTED,
        [0.0] * 5,
        counts=range(5),
        draft_seconds=draft_ms / 1e3,
        wait_seconds=0.5e-3,
        tokens_per_second=tokens_per_second,
    )
    assert found == count


def test_a_fixed_policy_asks_for_all_or_nothing_after_a_miss() -> None:
    def chosen(wait_ms: float) -> int:
        return tokens_after_miss(
            EXPECTED,
            [6.5e-3 + 0.1e-3 * count for count in range(5)],
            counts=(0, 4),
            draft_seconds=1.2e-3,
            wait_seconds=wait_ms / 1e3,
            tokens_per_second=300.0,
        )

    assert (chosen(0.5), chosen(3.0)) == (4, 0)


def test_rows_that_cost_as_much_as_they_bring_are_not_asked_for() -> None:
    found = tokens_after_miss(
        EXPECTED,
        [0.0, 1e-3, 2e-3, 5e-3, 9e-3],
        counts=range(5),
        draft_seconds=0.1e-3,
        wait_seconds=0.1e-3,
        tokens_per_second=300.0,
    )
    assert found == 2


@pytest.mark.parametrize(
    ("ready", "due_ms", "step_ms", "count"),
    [
        (2, 0.1, 0.1, 4),  # nearly free
        (
            2,
            0.2,
            1.2,
            3,
        ),  # 0.4 tokens for 0.2 ms, then 0.3 for 1.2 ms, where rounds make 0.3 in a millisecond
        (2, 1.5, 1.5, 2),  # too slow
        (4, 0.0, 0.1, 4),  # complete
    ],
)
def test_a_round_waits_after_a_hit_for_as_many_tokens_as_pay(
    ready: int, due_ms: float, step_ms: float, count: int
) -> None:
    unfinished = Unfinished(ready, 4, due_ms / 1e3, step_ms / 1e3)
    assert tokens_after_hit(EXPECTED, unfinished, tokens_per_second=300.0) == count


@given(st.integers(0, 4), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 1e4))
def test_a_wait_is_never_for_fewer_tokens_than_are_ready(
    ready: int, due: float, step: float, tokens_per_second: float
) -> None:
    found = tokens_after_hit(EXPECTED, Unfinished(ready, 4, due, step), tokens_per_second=tokens_per_second)
    assert ready <= found <= 4
