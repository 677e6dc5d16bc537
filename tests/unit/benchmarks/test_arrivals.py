"""Arrivals and lengths of a load: decided by the seed, distributed as said."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest

from benchmarks.load.arrivals import SHAREGPT_OUTPUTS, SHAREGPT_PROMPTS, Lengths, arrivals

COUNT = 4000
RATE = 25.0


def test_a_seed_decides_everything_and_another_seed_something_else() -> None:
    assert arrivals(50, RATE, 3) == arrivals(50, RATE, 3)
    assert arrivals(50, RATE, 3) != arrivals(50, RATE, 4)
    assert arrivals(20, RATE, 3) == arrivals(50, RATE, 3)[:20], "more requests leave the first as they are"


def test_the_rate_changes_no_length() -> None:
    slow, fast = arrivals(50, 1.0, 3), arrivals(50, math.inf, 3)
    assert [each.output_tokens for each in slow] == [each.output_tokens for each in fast]
    assert [each.prompt_tokens for each in slow] == [each.prompt_tokens for each in fast]


def test_gaps_are_exponential() -> None:
    times = [each.seconds for each in arrivals(COUNT, RATE, 0)]
    assert times[0] == 0.0
    gaps = [after - before for before, after in pairwise(times)]
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(1 / RATE, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / RATE, rel=0.1), (
        "an exponential's deviation is its mean"
    )
    assert sum(gap > 2 / RATE for gap in gaps) / len(gaps) == pytest.approx(math.exp(-2), rel=0.15)


def test_without_a_rate_all_arrive_at_the_start() -> None:
    assert {each.seconds for each in arrivals(10, math.inf, 0)} == {0.0}


@pytest.mark.parametrize("purpose", ["prompt_tokens", "output_tokens"])
def test_lengths_are_like_those_of_chats(purpose: str) -> None:
    lengths = [getattr(each, purpose) for each in arrivals(COUNT, RATE, 0)]
    wanted = SHAREGPT_PROMPTS if purpose == "prompt_tokens" else SHAREGPT_OUTPUTS
    assert statistics.median(lengths) == pytest.approx(wanted.median, rel=0.1)
    assert 160 < statistics.mean(lengths) < 240
    assert min(lengths) >= 4
    assert max(lengths) <= 1024


def test_lengths_without_a_deviation_are_all_the_same() -> None:
    same = Lengths.parse("32")
    assert {each.output_tokens for each in arrivals(20, RATE, 0, outputs=same)} == {32}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("32", (32.0, 0.0, 4, 1024)), ("100:1.5", (100.0, 1.5, 4, 1024)), ("2:1:8", (2.0, 1.0, 2, 8))],
)
def test_lengths_are_read_from_words(text: str, expected: tuple[float, float, int, int]) -> None:
    assert Lengths.parse(text) == Lengths(*expected)


@pytest.mark.parametrize("text", ["", "a", "0", "10:-1", "10:1:5", "1:2:3:4", "nan", "inf:1:inf"])
def test_wrong_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be|MEDIAN"):
        Lengths.parse(text)
