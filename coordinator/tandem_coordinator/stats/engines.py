"""Counts of a replica's engine that go on growing when its service restarts."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from tandem.model.types import TOKEN_BOUNDS, EngineStatistics, TokenHistogram


class EngineTally:
    """Adds up what the engine of one replica counts from when its process was met.

    A service counts from its start. What it counted before was for other coordinators, or for this one before it
    started again: to a rate of Prometheus it would be a jump. A process that starts anew counts from 0, which would be
    a fall.
    """

    def __init__(self) -> None:
        self._totals = [0] * _COUNT
        self._last: EngineStatistics | None = None
        self._instance_id = ""

    def take(self, statistics: EngineStatistics, instance_id: str) -> None:
        """Take what the engine of a process says by now."""
        counts = _counts_of(statistics)
        before = self._counts_before(counts, instance_id)
        self._totals = [
            total + now - was for total, now, was in zip(self._totals, counts, before, strict=True)
        ]
        self._last = statistics
        self._instance_id = instance_id

    def _counts_before(self, counts: list[int], instance_id: str) -> list[int]:
        """The counts from which the present ones are new."""
        if self._last is None or instance_id != self._instance_id:
            return counts
        before = _counts_of(self._last)
        # The same process counts from 0 again when it has loaded other weights.
        has_fallen = any(now < was for now, was in zip(counts, before, strict=True))
        return [0] * _COUNT if has_fallen else before

    @property
    def statistics(self) -> EngineStatistics | None:
        """The latest values, with all counts; None before the first."""
        if self._last is None:
            return None
        queries, hits, token_sum, *steps = self._totals
        return replace(
            self._last,
            prefix_query_tokens=queries,
            prefix_hit_tokens=hits,
            step_tokens=TokenHistogram(TOKEN_BOUNDS, tuple(steps), token_sum),
        )


_COUNT = 3 + len(TOKEN_BOUNDS) + 1


def _counts_of(statistics: EngineStatistics) -> list[int]:
    """Everything that only grows."""
    steps = statistics.step_tokens
    return [
        statistics.prefix_query_tokens,
        statistics.prefix_hit_tokens,
        steps.token_sum,
        *_in_own_buckets(steps),
    ]


def _in_own_buckets(histogram: TokenHistogram) -> list[int]:
    """The counts in our buckets, since another version of the service may have other ones."""
    own = [0] * (len(TOKEN_BOUNDS) + 1)
    for bound, count in zip(histogram.upper_bounds, histogram.counts, strict=False):
        own[bisect_left(TOKEN_BOUNDS, bound)] += count
    own[-1] += histogram.counts[-1]
    return own
