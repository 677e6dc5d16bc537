"""What speculation did, for whoever reads the log: MAX's line every few seconds of activity."""

from __future__ import annotations

import asyncio
import logging

from coordinator.figures import CumulativeFigures, add, log_line
from tandem.types import SpeculationFigures

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 5.0


class FiguresLog:
    """Counts finished requests, and logs a line for those of each interval that had any."""

    def __init__(self, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self.cumulative = CumulativeFigures()
        """Since the start."""
        self._interval_seconds = interval_seconds
        self._recent = SpeculationFigures()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, rule: str, figures: SpeculationFigures) -> None:
        """Count a finished request that ran under `rule`. Called on the event loop."""
        self.cumulative.add(rule, figures)
        add(self._recent, figures)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._interval_seconds, self._write)

    def close(self) -> None:
        """Log what is left."""
        if self._timer is not None:
            self._timer.cancel()
            self._write()

    def _write(self) -> None:
        self._timer = None
        if line := log_line(self._recent):
            logger.info(line)
        self._recent = SpeculationFigures()
