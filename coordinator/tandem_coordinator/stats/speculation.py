"""Statistics of all requests: acceptance in MAX's and vLLM's terms, throughput, and the log lines that report them."""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from itertools import zip_longest
from typing import Any

from tandem.model.speculation_state import SpeculationState
from tandem.model.types import LeadStats, PositionStats, SamplingParams, SpeculationStats
from tandem_coordinator.stats.rounds import RoundEnded, RoundTally, hit_rate


class MovingAverage:
    """An exponentially weighted moving average."""

    value: float | None = None
    """None before the first measurement."""

    def add(self, measured: float) -> None:
        """Count a measurement. The first one is the average."""
        if self.value is None:
            self.value = measured
        else:
            # Twenty measurements or so count: enough to even out noise, few enough to follow a change within seconds.
            self.value += 0.1 * (measured - self.value)


class MovingMedian:
    """The median of the last few measurements, which one slow one does not move; of an even number the lower one."""

    def __init__(self, count: int = 9, first: Sequence[float] = ()) -> None:
        self._count = count
        self._last = deque(first)
        self._ordered = sorted(first)

    @property
    def value(self) -> float | None:
        """None before the first measurement."""
        ordered = self._ordered
        return ordered[(len(ordered) - 1) // 2] if ordered else None

    def add(self, measured: float) -> None:
        if len(self._last) == self._count:
            oldest = self._last.popleft()
            del self._ordered[bisect_left(self._ordered, oldest)]
        self._last.append(measured)
        insort(self._ordered, measured)


class TokenCounter:
    """Counts tokens as they are committed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = 0
        """Since the start."""
        self._clock = clock
        self._started = clock()
        self._by_second: deque[list[int]] = deque(maxlen=60)
        """The last seconds in which tokens were committed, each with their count."""

    def add(self, count: int) -> None:
        second = int(self._clock() - self._started)
        if not self._by_second or self._by_second[-1][0] != second:
            self._by_second.append([second, 0])
        self._by_second[-1][1] += count
        self.total += count

    def rate(self, seconds: int) -> float:
        """Tokens per second over the last `seconds`, 60 at most, or since the start if that was later.

        The current second counts in part.
        """
        now = self._clock() - self._started
        oldest = max(int(now) - seconds + 1, 0)
        counted = sum(count for second, count in self._by_second if second >= oldest)
        elapsed = now - oldest
        return counted / elapsed if elapsed > 0 else 0.0


def add(total: SpeculationStats, stats: SpeculationStats, times: int = 1) -> None:
    """Count in `total` everything that `stats` counted, so many times."""
    while len(total.positions) < len(stats.positions):
        total.positions.append(PositionStats())
    parts: list[tuple[Any, Any]] = [(total, stats), (total.lead, stats.lead), (total.ahead, stats.ahead)]
    for own, other in (*parts, *zip(total.positions, stats.positions, strict=False)):
        for each in fields(own):
            if isinstance(more := getattr(other, each.name), int | float):
                setattr(own, each.name, getattr(own, each.name) + times * more)
    ranks = zip_longest(total.ahead.hits_by_rank, stats.ahead.hits_by_rank, fillvalue=0)
    total.ahead.hits_by_rank = [before + times * hits for before, hits in ranks]


def since(stats: SpeculationStats, earlier: SpeculationStats) -> SpeculationStats:
    """Counts added since `earlier`."""
    difference = sum_stats([stats])
    add(difference, earlier, -1)
    # Sums of floats differ in the last bit.
    difference.ahead.saved_seconds = max(difference.ahead.saved_seconds, 0.0)
    return difference


def sum_stats(parts: Iterable[SpeculationStats]) -> SpeculationStats:
    """All counts together, in statistics of their own."""
    total = SpeculationStats()
    for each in parts:
        add(total, each)
    return total


def proposals(stats: SpeculationStats) -> int:
    """Verifications that had a proposal."""
    return stats.positions[0].drafted if stats.positions else 0


def acceptance_rate(stats: SpeculationStats) -> float:
    """Share of the proposed tokens that were accepted; 0 when none was proposed."""
    return _share(stats.accepted, stats.drafted)


def acceptance_length(stats: SpeculationStats) -> float:
    """MAX's acceptance length: accepted tokens for each verification."""
    return _share(stats.accepted, stats.rounds)


def tokens_per_pass(stats: SpeculationStats) -> float:
    """Tokens for each verification, including the target's own."""
    return 1.0 + acceptance_length(stats)


def mean_acceptance_length(stats: SpeculationStats) -> float:
    """vLLM's: tokens for each verification that had a proposal, including the target's own; 0 without any."""
    return 1.0 + _share(stats.accepted, proposals(stats)) if stats.drafted else 0.0


def cumulative_rates(stats: SpeculationStats) -> list[float]:
    """For each position: of all proposals, those that were too short for it included, the share in which the token
    there was accepted. It never rises with the position."""
    return [_share(position.accepted, proposals(stats)) for position in stats.positions]


def conditional_rates(stats: SpeculationStats) -> list[float]:
    """For each position: of the tokens whose predecessors were all accepted, the share that was accepted."""
    return [_share(position.accepted, position.reached) for position in stats.positions]


def describe(stats: SpeculationStats, state: SpeculationState | None = None) -> dict[str, object]:
    """All statistics by name, of types that JSON has, and the speculation state where it is known.

    `acceptance_length` is MAX's, and `tokens_per_pass` is one more; `mean_acceptance_length` is vLLM's.
    """
    return {
        "rounds": stats.rounds,
        "proposals": proposals(stats),
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "forced": stats.forced,
        "acceptance_rate": round(acceptance_rate(stats), 6),
        "acceptance_length": round(acceptance_length(stats), 6),
        "tokens_per_pass": round(tokens_per_pass(stats), 6),
        "mean_acceptance_length": round(mean_acceptance_length(stats), 6),
        "per_position": {
            "cumulative": _round_rates(cumulative_rates(stats)),
            "conditional": _round_rates(conditional_rates(stats)),
        },
        "ahead": {
            "awaited": stats.ahead.awaited,
            "hits": stats.ahead.hits,
            "hit_rate": round(hit_rate(stats.ahead), 6),
            "hits_by_rank": list(stats.ahead.hits_by_rank),
            "saved_seconds": round(stats.ahead.saved_seconds, 6),
        },
        "lead": asdict(stats.lead),
        **({} if state is None else {"state": state.as_dict()}),
    }


def describe_as_vllm(stats: SpeculationStats) -> dict[str, object]:
    """vLLM's figures of a request, `metrics.speculative_decoding`, by its names (0.33).

    Its steps are the verifications that had a proposal.
    """
    steps = proposals(stats)
    beyond = [position.accepted for position in stats.positions]
    reached = [steps, *beyond]
    return {
        "mean_acceptance_length": mean_acceptance_length(stats) or 1.0,
        "draft_acceptance_rate": acceptance_rate(stats),
        "acceptance_histogram": [more - most for more, most in zip(reached, [*beyond, 0], strict=True)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.drafted,
        "num_spec_tokens": len(stats.positions),
        "cumulative_acceptance_rates": _round_rates(cumulative_rates(stats)),
        "conditional_acceptance_rates": _round_rates(conditional_rates(stats)),
    }


def describe_sampling(sampling: SamplingParams) -> dict[str, float]:
    """The parameters that tokens were drawn with by name, without the seed, which each completion has to itself."""
    described = asdict(sampling)
    del described["seed"]
    return described


def log_line(stats: SpeculationStats) -> str:
    """The statistics as MAX's scheduler logs them; empty when nothing was proposed.

    The acceptance length is MAX's, beside the longest possible one, and the rates are cumulative. What drafting ahead
    did follows, where it did anything.
    """
    if not stats.drafted:
        return ""
    rates = ", ".join(f"{rate:.0%}" for rate in cumulative_rates(stats))
    line = (
        f"Draft Tokens: {stats.accepted}/{stats.drafted} ({acceptance_rate(stats):.2%}) accepted, "
        f"Acceptance Len: {acceptance_length(stats):.2f} / {len(stats.positions)} toks, "
        f"Per-Pos: [{rates}] |"
    )
    ahead = stats.ahead
    if not ahead.awaited:
        return line
    hits = f"{ahead.hits}/{ahead.awaited} ({hit_rate(ahead):.2%})"
    return f"{line} Drafted Ahead: {hits} hits, {ahead.saved_seconds:.2f} s saved |"


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _round_rates(rates: list[float]) -> list[float]:
    return [round(rate, 6) for rate in rates]


logger = logging.getLogger(__name__)


Pair = tuple[str, str]


class StatsLog:
    """Counts the rounds of all requests, and logs a line for each interval in which anything was proposed.

    Where several pairs of draft and target were at work, each has a line of its own before the one for all.
    """

    # A twelfth of the minute that `last_minute` looks back on
    def __init__(self, interval_seconds: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._by_rule: defaultdict[str, RoundTally] = defaultdict(RoundTally)
        self._by_pair: defaultdict[Pair, RoundTally] = defaultdict(RoundTally)
        """Counts of the present interval."""
        self._intervals: deque[tuple[float, SpeculationStats]] = deque()
        """Ends and statistics of the intervals of the last minute."""
        self._timer: asyncio.TimerHandle | None = None

    def round_ended(self, rule: str, result: RoundEnded) -> None:
        self._by_rule[rule].add_round(result)
        pair = result.draft_address or "none", result.target_address or "none"
        self._by_pair[pair].add_round(result)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._interval_seconds, self._end_interval)

    def led(self, rule: str, lead: LeadStats) -> None:
        """Count what targets did before they were asked for a request under `rule`, which has ended."""
        own = self._by_rule[rule].lead
        own.rounds = own.rounds + lead.rounds
        own.wasted = own.wasted + lead.wasted

    def snapshot(self) -> tuple[SpeculationStats, dict[str, SpeculationStats]]:
        """Statistics since the start, in total and per rule, as they are now."""
        by_rule = {rule: sum_stats([tally.stats()]) for rule, tally in self._by_rule.items()}
        return sum_stats(by_rule.values()), by_rule

    def round_counts(self) -> Counter[tuple[int, int]]:
        """Rounds since the start, by their proposed and their accepted tokens."""
        total: Counter[tuple[int, int]] = Counter()
        for tally in self._by_rule.values():
            total += tally.counts
        return total

    def last_minute(self) -> SpeculationStats:
        """Statistics of the present interval, and of those that ended in the last minute."""
        # As far as the rates of the dashboards look back, [1m]
        while self._intervals and self._clock() - self._intervals[0][0] >= 60.0:
            self._intervals.popleft()
        present = (tally.stats() for tally in self._by_pair.values())
        return sum_stats([*present, *(stats for _, stats in self._intervals)])

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._end_interval()

    def _end_interval(self) -> None:
        self._timer = None
        by_pair = {pair: tally.stats() for pair, tally in self._by_pair.items()}
        total = sum_stats(by_pair.values())
        self._by_pair.clear()
        self.last_minute()  # forgets older ones
        self._intervals.append((self._clock(), total))
        drafted = {pair: stats for pair, stats in by_pair.items() if stats.drafted}
        if len(drafted) == 1:
            _log(total, *drafted)
            return
        for pair, stats in drafted.items():
            _log(stats, pair)
        _log(total)


def _log(stats: SpeculationStats, pair: Pair | None = None) -> None:
    if line := log_line(stats):
        logger.info(line, extra={} if pair is None else {"draft": pair[0], "target": pair[1]})
