"""Percentiles, goodput and rates of a load."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load.figures import Goodput, Served, figures, histogram_quantile, percentile, spread

FAST = Served(10.0, 5, 4, [10.1, 10.2, 10.4], 10.5)
"""TTFT 100 ms, gaps of 100 and 200 ms, 500 ms in all, 133 ms by token after the first."""
SLOW = Served(11.0, 5, 1, [12.0], 12.0)
FAILED = Served(11.0, 5, 2, [11.5], 13.0, "ServiceUnavailableError")


@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=50), percent=st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(
        float(np.percentile(values, percent)), abs=1e-6
    )


def test_a_spread_is_in_milliseconds() -> None:
    found = spread([0.003, 0.001, 0.002], [50, 99.9])
    assert found.mean == pytest.approx(2.0)
    assert found.percentiles == pytest.approx({"p50": 2.0, "p99.9": 2.998})


def test_figures_count_what_was_completed_from_the_first_arrival_to_the_last_end() -> None:
    found = figures([FAST, SLOW, FAILED], Goodput({}), [50])
    assert (found.completed, found.failed, found.errors) == (2, 1, {"ServiceUnavailableError": 1})
    assert found.seconds == pytest.approx(3.0)
    assert (found.prompt_tokens, found.output_tokens) == (10, 5)
    assert found.requests_per_second == pytest.approx(2 / 3)
    assert found.output_tokens_per_second == pytest.approx(5 / 3)
    assert found.goodput is None
    assert found.latencies["ttft"].mean == pytest.approx(550.0)
    assert found.latencies["itl"].mean == pytest.approx(150.0)
    assert found.latencies["tpot"].mean == pytest.approx(400 / 3)
    assert found.latencies["e2el"].percentiles["p50"] == pytest.approx(750.0)


def test_a_single_token_has_no_time_between_tokens() -> None:
    found = figures([SLOW], Goodput({}), [50])
    assert set(found.latencies) == {"ttft", "e2el"}


@pytest.mark.parametrize(
    ("words", "good"),
    [
        (["ttft:100.1"], 1),
        (["ttft:1001"], 2),
        (["ttft:99"], 0),
        (["itl:199"], 1),  # that of the single token, which waits for nothing
        (["ttft:500", "itl:201"], 1),
        (["ttft:500", "itl:199"], 0),
        (["tpot:134", "e2el:501"], 1),
    ],
)
def test_goodput_counts_requests_within_all_bounds(words: list[str], good: int) -> None:
    found = figures([FAST, SLOW, FAILED], Goodput.parse(words), [50])
    assert found.goodput == pytest.approx(good / 3.0)


@pytest.mark.parametrize("word", ["ttft", "ttft:", "ttft:fast", "first:3", "ttft:-1", ":5"])
def test_a_wrong_bound_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="must be NAME:MILLISECONDS"):
        Goodput.parse([word])


def test_a_quantile_of_a_histogram_lies_inside_its_bucket() -> None:
    buckets = [(0.001, 50.0), (0.01, 100.0), (math.inf, 100.0)]
    assert histogram_quantile(buckets, 0.5) == pytest.approx(0.001)
    assert histogram_quantile(buckets, 0.75) == pytest.approx(0.0055)
    assert histogram_quantile([(0.001, 1.0), (math.inf, 100.0)], 0.99) == 0.001, "at least the last bound"
    assert histogram_quantile([(0.001, 0.0), (math.inf, 0.0)], 0.99) == 0.0
