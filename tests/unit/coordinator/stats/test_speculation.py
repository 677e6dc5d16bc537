"""Speculation statistics: counts by round and rank, the rates of MAX and vLLM, and the log line."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.model.types import AheadStats, PositionStats, SpeculationStats
from tandem_coordinator.stats.rounds import MAX_RANKS, RoundTally
from tandem_coordinator.stats.speculation import (
    StatsLog,
    TokenCounter,
    acceptance_length,
    acceptance_rate,
    add,
    conditional_rates,
    cumulative_rates,
    describe_as_vllm,
    log_line,
    mean_acceptance_length,
    since,
    tokens_per_pass,
)
from tests.service.clients import until
from tests.unit.coordinator.ended_rounds import round_ended


def counted(*rounds: tuple[int, int, int]) -> SpeculationStats:
    """Record rounds given as (number of rounds, tokens drafted, tokens accepted)."""
    tally = RoundTally()
    for count, drafted, accepted in rounds:
        for _ in range(count):
            tally.add_round(round_ended(drafted, accepted))
    return tally.stats()


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


# 100 verifications, 20 of which had no proposal.
EXAMPLE = counted((69, 2, 2), (7, 2, 1), (4, 2, 0), (20, 0, 0))


def test_the_log_line_is_that_of_max() -> None:
    assert log_line(EXAMPLE) == (
        "Draft Tokens: 145/160 (90.62%) accepted, Acceptance Len: 1.45 / 2 toks, Per-Pos: [95%, 86%] |"
    )
    assert log_line(SpeculationStats()) == log_line(counted((3, 0, 0))) == "", "nothing was proposed"


def test_acceptance_length_of_max_and_vllm() -> None:
    assert acceptance_length(EXAMPLE) == 1.45
    assert tokens_per_pass(EXAMPLE) == 2.45
    assert mean_acceptance_length(EXAMPLE) == 1 + 145 / 80, "20 of 100 rounds had no proposal"
    assert mean_acceptance_length(counted((20, 0, 0))) == 0.0


def test_rates_per_position_of_max_and_vllm() -> None:
    assert cumulative_rates(EXAMPLE) == [0.95, 69 / 80]
    assert conditional_rates(EXAMPLE) == [0.95, 69 / 76]
    assert acceptance_rate(EXAMPLE) == 145 / 160


def test_the_figures_of_a_request_as_vllm_tells_them() -> None:
    assert describe_as_vllm(EXAMPLE) == {
        "mean_acceptance_length": 1 + 145 / 80,
        "draft_acceptance_rate": 145 / 160,
        "acceptance_histogram": [4, 7, 69],
        "num_spec_steps": 80,
        "num_accepted_draft_tokens": 145,
        "num_draft_tokens": 160,
        "num_spec_tokens": 2,
        "cumulative_acceptance_rates": [0.95, 0.8625],
        "conditional_acceptance_rates": [0.95, 0.907895],
    }
    assert describe_as_vllm(SpeculationStats())["acceptance_histogram"] == [0]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(0, 6)), min_size=1))
def test_a_cumulative_rate_never_rises_with_the_position(rounds: list[tuple[int, int, int]]) -> None:
    """However long each proposal was."""
    rates = cumulative_rates(
        counted(*((count, drafted, min(kept, drafted)) for count, drafted, kept in rounds))
    )
    assert rates == sorted(rates, reverse=True)


def test_a_position_that_was_never_reached_has_rate_zero() -> None:
    stats = counted((5, 3, 0))
    assert conditional_rates(stats) == [0.0, 0.0, 0.0]
    assert stats.positions[1] == PositionStats(5, 0, 0)


async def test_statistics_by_rule_since_the_start() -> None:
    log = StatsLog()
    for rule, drafted, accepted in (
        ("residual", 2, 1),
        ("residual", 2, 1),
        ("greedy", 3, 3),
        ("residual", 2, 2),
    ):
        log.round_ended(rule, round_ended(drafted, accepted))
    total, by_rule = log.snapshot()
    assert by_rule == {"residual": counted((2, 2, 1), (1, 2, 2)), "greedy": counted((1, 3, 3))}
    assert total == counted((2, 2, 1), (1, 3, 3), (1, 2, 2))
    log.round_ended("greedy", round_ended(3, 0))
    assert by_rule["greedy"] == counted((1, 3, 3)), "a snapshot stays as it was"
    log.close()


async def test_the_last_minute_forgets() -> None:
    clock = Clock()
    log = StatsLog(clock=clock)
    log.round_ended("greedy", round_ended(2, 2))
    assert (log.last_minute().drafted, log.last_minute().accepted) == (2, 2)
    log.close()  # ends the interval
    clock.now += 30.0
    log.round_ended("greedy", round_ended(2, 0))
    assert (log.last_minute().drafted, log.last_minute().accepted) == (4, 2)
    log.close()
    clock.now += 31.0
    assert (log.last_minute().drafted, log.last_minute().accepted) == (2, 0)
    clock.now += 300.0
    assert log.last_minute() == SpeculationStats()


def test_a_new_counter_has_rate_zero() -> None:
    clock = Clock()
    counter = TokenCounter(clock)
    assert counter.rate(10) == 0.0
    clock.now += 5
    assert counter.rate(10) == 0.0


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


def count(log: StatsLog, draft: str | None, target: str, *rounds: tuple[int, int]) -> None:
    for proposed, accepted in rounds:
        log.round_ended("strict", round_ended(proposed, accepted, draft=draft, target=target))


async def test_a_line_for_each_interval_with_activity(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = StatsLog(interval_seconds=0.05)
    count(log, "d:1", "t:1", (2, 2), (2, 0), (2, 1))
    assert caplog.messages == []
    await until(lambda: bool(caplog.messages), 10.0)
    assert caplog.messages == [
        "Draft Tokens: 3/6 (50.00%) accepted, Acceptance Len: 1.00 / 2 toks, Per-Pos: [67%, 33%] |"
    ]
    assert vars(caplog.records[0])["draft"] == "d:1"
    assert vars(caplog.records[0])["target"] == "t:1"
    count(log, "d:1", "t:1", (2, 2))
    log.close()
    assert caplog.messages[1:] == [
        "Draft Tokens: 2/2 (100.00%) accepted, Acceptance Len: 2.00 / 2 toks, Per-Pos: [100%, 100%] |"
    ]


async def test_each_pair_has_its_line_before_the_one_for_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = StatsLog(interval_seconds=30.0)
    count(log, None, "t:1", (0, 0))  # rounds before the first draft have no line
    count(log, "d:2", "t:1", (2, 0))
    count(log, "d:1", "t:1", (2, 2))
    log.close()
    assert caplog.messages == [
        "Draft Tokens: 0/2 (0.00%) accepted, Acceptance Len: 0.00 / 2 toks, Per-Pos: [0%, 0%] |",
        "Draft Tokens: 2/2 (100.00%) accepted, Acceptance Len: 2.00 / 2 toks, Per-Pos: [100%, 100%] |",
        "Draft Tokens: 2/4 (50.00%) accepted, Acceptance Len: 0.67 / 2 toks, Per-Pos: [50%, 50%] |",
    ]
    assert [vars(record).get("draft") for record in caplog.records] == ["d:2", "d:1", None]


def stats_of(*ranks: int | None, saved: float = 0.25) -> SpeculationStats:
    """Record one round for each rank; None is a miss."""
    tally = RoundTally()
    for rank in ranks:
        hit_seconds = 0.0 if rank is None else saved
        tally.add_round(round_ended(4, 2, awaited=True, rank=rank, saved=hit_seconds))
    return tally.stats()


def test_hits_are_counted_by_rank_and_ranks_alone_are_bounded() -> None:
    assert stats_of(0, 2, None, 0).ahead == AheadStats(4, 3, [2, 0, 1], 0.75)
    ahead = stats_of(MAX_RANKS - 1, MAX_RANKS, 63).ahead
    assert ahead.hits == 3
    assert ahead.hits_by_rank == [0] * (MAX_RANKS - 1) + [1]


@pytest.mark.parametrize(("first", "second"), [((0, 3), (None, 1)), ((1,), (0, 5, None)), ((), (2,))])
def test_add_sums_and_since_subtracts(first: tuple[int | None, ...], second: tuple[int | None, ...]) -> None:
    total = stats_of(*first)
    whole = stats_of(*first, *second)
    fresh = since(whole, total)
    kept = replace(fresh.ahead)
    add(total, fresh)
    assert total == whole
    assert fresh.ahead == kept, "what is added stays as it was"


def test_saved_time_never_decreases() -> None:
    """Counters of metrics refuse a negative step, and sums of floats differ in their last bit."""
    counted = SpeculationStats()
    stats = SpeculationStats()
    for _ in range(500):
        add(stats, stats_of(0, saved=0.1))
        fresh = since(stats, counted)
        assert fresh.ahead.saved_seconds >= 0.0
        add(counted, fresh)
        assert since(stats, counted).ahead.saved_seconds >= 0.0


def test_the_log_line_reports_the_saved_time() -> None:
    assert log_line(stats_of(0, None)).endswith("| Drafted Ahead: 1/2 (50.00%) hits, 0.25 s saved |")
    assert "Ahead" not in log_line(stats_of())


rounds = st.integers(0, 6).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted)))


@given(st.lists(rounds, max_size=40))
def test_statistics_are_those_of_counting_each_position(made: list[tuple[int, int]]) -> None:
    tally = RoundTally()
    for drafted, accepted in made:
        tally.add_round(round_ended(drafted, accepted))
    stats = tally.stats()
    assert stats.rounds == len(made)
    assert stats.drafted == sum(drafted for drafted, _ in made)
    assert stats.accepted == sum(accepted for _, accepted in made)
    longest = max((drafted for drafted, _ in made), default=0)
    assert stats.positions == [
        PositionStats(
            drafted=sum(drafted > index for drafted, _ in made),
            reached=sum(drafted > index <= accepted for drafted, accepted in made),
            accepted=sum(accepted > index for _, accepted in made),
        )
        for index in range(longest)
    ]


def test_forced_tokens_are_counted_apart() -> None:
    tally = RoundTally()
    tally.add_round(round_ended(4, 2))
    tally.add_round(round_ended(0, 0)._replace(forced=9))
    stats = tally.stats()
    assert (stats.rounds, stats.drafted, stats.accepted, stats.forced) == (2, 4, 2, 9)
    assert cumulative_rates(stats) == [1.0, 1.0, 0.0, 0.0]
    assert since(stats, stats).forced == 0
