"""Counts of an engine begin when its process is met, and never fall."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tandem.model.types import TOKEN_BOUNDS, EngineStatistics, TokenHistogram
from tandem_coordinator.stats.engines import EngineTally

EMPTY = EngineStatistics(
    kv_cache_tokens=1024,
    reserved_tokens=0,
    page_tokens=64,
    reuses_prefixes=True,
    prefix_query_tokens=0,
    prefix_hit_tokens=0,
    step_tokens=TokenHistogram(),
)


def at(queries: int, *, reserved: int = 0) -> EngineStatistics:
    """Return the statistics of an engine that looked up so many tokens."""
    return replace(EMPTY, prefix_query_tokens=queries, reserved_tokens=reserved)


def queries_of(tally: EngineTally) -> int:
    assert tally.statistics is not None
    return tally.statistics.prefix_query_tokens


def test_nothing_is_known_before_the_engine_says_something() -> None:
    assert EngineTally().statistics is None


def test_counts_begin_when_the_process_is_met() -> None:
    tally = EngineTally()
    tally.take(at(500), "a")
    assert queries_of(tally) == 0
    tally.take(at(530, reserved=64), "a")
    assert queries_of(tally) == 30
    assert tally.statistics is not None
    assert tally.statistics.reserved_tokens == 64


def test_a_process_that_starts_anew_adds_to_what_the_last_one_counted() -> None:
    tally = EngineTally()
    tally.take(at(0), "a")
    tally.take(at(30), "a")
    tally.take(at(0), "b")
    tally.take(at(5), "b")
    assert queries_of(tally) == 35


def test_a_process_that_loads_other_weights_counts_from_0() -> None:
    tally = EngineTally()
    tally.take(at(0), "a")
    tally.take(at(30), "a")
    tally.take(at(4), "a")
    assert queries_of(tally) == 34


def test_steps_are_counted_in_our_own_buckets() -> None:
    tally = EngineTally()
    tally.take(replace(EMPTY, step_tokens=TokenHistogram((8,), (0, 0), 0)), "a")
    tally.take(replace(EMPTY, step_tokens=TokenHistogram((8,), (3, 2), 120)), "a")
    assert tally.statistics is not None
    steps = tally.statistics.step_tokens
    assert steps.upper_bounds == TOKEN_BOUNDS
    assert steps.counts[TOKEN_BOUNDS.index(10)] == 3
    assert steps.counts[-1] == 2
    assert sum(steps.counts) == 5
    assert steps.token_sum == 120


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(0, 100)), max_size=30))
def test_no_answers_let_a_count_fall(answers: list[tuple[str, int]]) -> None:
    tally = EngineTally()
    before = 0
    for instance_id, queries in answers:
        tally.take(at(queries), instance_id)
        assert queries_of(tally) >= before
        before = queries_of(tally)
