"""Logs speculation statistics: MAX's line every few seconds of activity."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict

from coordinator.stats.rounds import RoundResult
from coordinator.stats.speculation import CumulativeStats, add, log_line
from coordinator.stats.tally import RoundTally
from tandem.types import SpeculationStats

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 5.0

Pair = tuple[str, str]
"""Addresses of a draft and of a target."""


class StatsLog:
    """Counts the rounds of all requests, and logs a line for each interval in which anything was proposed.

    Where several pairs of draft and target were at work, each has a line of its own before the one for all.
    """

    def __init__(self, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self.cumulative = CumulativeStats()
        """Statistics since the start."""
        self._interval_seconds = interval_seconds
        self._recent: defaultdict[Pair, RoundTally] = defaultdict(RoundTally)
        self._timer: asyncio.TimerHandle | None = None

    def round_ended(self, rule: str, result: RoundResult) -> None:
        """Count a round of a request that runs under `rule`."""
        self.cumulative.record(rule, result)
        pair = result.draft_address or "none", result.target_address or "none"
        self._recent[pair].add_result(result)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._interval_seconds, self._write)

    def close(self) -> None:
        """Log the last, unfinished interval."""
        if self._timer is not None:
            self._timer.cancel()
            self._write()

    def _write(self) -> None:
        self._timer = None
        total = SpeculationStats()
        recent = {pair: tally.stats() for pair, tally in self._recent.items()}
        for stats in recent.values():
            add(total, stats)
        pairs = {pair: stats for pair, stats in recent.items() if stats.drafted}
        self._recent.clear()
        if len(pairs) == 1:
            _log(total, *pairs)
            return
        for pair, stats in pairs.items():
            _log(stats, pair)
        _log(total)


def _log(stats: SpeculationStats, pair: Pair | None = None) -> None:
    if line := log_line(stats):
        logger.info(line, extra={} if pair is None else {"draft": pair[0], "target": pair[1]})
