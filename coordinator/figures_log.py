"""What speculation did, for whoever reads the log: MAX's line every few seconds of activity."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from coordinator.figures import CumulativeFigures, add, log_line, since
from coordinator.requests import ActiveRequest
from tandem.types import SpeculationFigures

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 5.0

Pair = tuple[str, str]
"""Addresses of a draft and of a target."""


class FiguresLog:
    """Counts what requests do, and logs a line for each interval in which anything was proposed.

    Where several pairs of draft and target were at work, each has a line of its own before the one for all.
    """

    def __init__(self, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self.cumulative = CumulativeFigures()
        """Of requests that have ended, since the start."""
        self._interval_seconds = interval_seconds
        self._followed: dict[ActiveRequest, _Followed] = {}
        self._recent: defaultdict[Pair, SpeculationFigures] = defaultdict(SpeculationFigures)
        self._timer: asyncio.TimerHandle | None = None

    def add(self, rule: str, figures: SpeculationFigures) -> None:
        """Count a request that ran under `rule` and has ended."""
        self.cumulative.add(rule, figures)

    @contextmanager
    def following(self, request: ActiveRequest) -> Iterator[None]:
        """Log what the request does, for as long as the block lasts. Its draft and target are known in the block."""
        self._followed[request] = followed = _Followed(request)
        self._await_interval()
        try:
            yield
        finally:
            del self._followed[request]
            self._take(followed)

    def close(self) -> None:
        """Log what is left."""
        if self._timer is not None:
            self._timer.cancel()
            self._write()

    def _await_interval(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._interval_seconds, self._end_interval)

    def _end_interval(self) -> None:
        for followed in self._followed.values():
            self._take(followed)
        self._write()
        if self._followed:
            self._await_interval()

    def _take(self, followed: _Followed) -> None:
        pair, fresh = followed.fresh()
        add(self._recent[pair], fresh)

    def _write(self) -> None:
        self._timer = None
        recent = {pair: figures for pair, figures in self._recent.items() if figures.rounds}
        self._recent.clear()
        total = SpeculationFigures()
        for pair, figures in recent.items():
            add(total, figures)
            if len(recent) > 1:
                _log(figures, pair)
        if len(recent) == 1:
            _log(total, *recent)
        else:
            _log(total)


class _Followed:
    """A request, and what of it has been logged."""

    def __init__(self, request: ActiveRequest) -> None:
        self._request = request
        self._logged = SpeculationFigures()
        self._draft = self._target = "none"

    def fresh(self) -> tuple[Pair, SpeculationFigures]:
        """What the request did since the last time, all of it where it is now."""
        self._draft = self._request.draft_address or self._draft
        self._target = self._request.target_address or self._target
        fresh = since(self._request.completion.figures, self._logged)
        add(self._logged, fresh)
        return (self._draft, self._target), fresh


def _log(figures: SpeculationFigures, pair: Pair | None = None) -> None:
    if line := log_line(figures):
        logger.info(line, extra={} if pair is None else {"draft": pair[0], "target": pair[1]})
