"""A coordinator's processor time for a token, by that of another and above a stub's."""

from __future__ import annotations

import pytest

from benchmarks.coordinator_cost import CostSettings, Pair, measure_stub, median_interval, table


def test_the_median_of_ten_lies_between_the_second_and_the_ninth() -> None:
    """With 97.9 %; between the third and the eighth it is 89 %."""
    assert median_interval(range(1, 11)) == (2, 9)


def test_of_few_values_the_interval_is_all_of_them() -> None:
    assert median_interval([3.0]) == (3.0, 3.0)
    assert median_interval([1.0, 2.0, 3.0, 4.0, 5.0]) == (1.0, 5.0)


def test_coordinators_are_compared_above_the_stub() -> None:
    pairs = [Pair(10.0, 60.0, 110.0, 1000.0), Pair(20.0, 80.0, 120.0, 2000.0)]

    text = table(pairs)

    assert "| coordinator, above the stub | 55 | 50 | 60 |" in text
    assert "by the other: 0.550 (95% interval of the median 0.500 to 0.600, 2 pairs)" in text
    assert "1500 tokens/s" in text


@pytest.mark.parametrize("rule", ["greedy", "residual"])
async def test_a_stub_exchanges_the_messages_and_ends(rule: str) -> None:
    settings = CostSettings(streams=3, rule=rule)

    assert await measure_stub(settings) > 0
