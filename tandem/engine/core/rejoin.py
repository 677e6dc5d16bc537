"""A short wait, before a step, for the sequences that the last step has answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from tandem.engine.kv_cache.sequence import Sequence

_PATIENCE = 0.3
"""Share of a step's time for which the next one waits for the sequences that the step has answered.

They return within a round trip, and a step without them costs nearly as much as one with them. Without any patience,
the first to return runs alone, the others follow together, and from then on each token pays for two steps.
docs/engine.md has the measurements.
"""
_MAX_SKIPPED_WAITS = 63
"""After a wait in vain the next one is skipped, then three, then seven, up to this many."""


class RejoinWindow:
    """Knows which sequences are expected back. Every method is called with the condition held."""

    def __init__(self, wakeup: threading.Condition) -> None:
        self._wakeup = wakeup
        self._missing: set[Sequence] = set()
        """Sequences that the last step answered and that have not returned."""
        self._ends = 0.0
        self._is_waiting = False
        self._waits_skipped = 0
        self._waits_to_skip = 0

    def expect(self, sequences: Iterable[Sequence], began: float, ended: float) -> None:
        """A step from `began` to `ended` has answered these sequences, which do not know it yet."""
        self._ends = ended + _PATIENCE * (ended - began)
        self._missing = {sequence for sequence in sequences if not sequence.is_released}

    def came_back(self, sequence: Sequence) -> None:
        """Wakes the thread; not for each of many that it waits for."""
        self._missing.discard(sequence)
        if not (self._is_waiting and self._missing):
            self._wakeup.notify()

    def wait(self, *, has_running: bool, is_stopping: Callable[[], bool]) -> None:
        """Waits, although there is work, until all are back or the time is over.

        Args:
            has_running: True if other sequences are in the middle of their work; they must not wait.
            is_stopping: ends the wait at once.
        """
        if self._waits_to_skip > 0 or has_running:
            self._waits_to_skip = max(0, self._waits_to_skip - 1)
        elif self._missing:
            self._is_waiting = True
            while self._missing and not is_stopping() and time.perf_counter() < self._ends:
                self._wakeup.wait(self._ends - time.perf_counter())
            self._is_waiting = False
            skipped = 2 * self._waits_skipped + 1 if self._missing else 0
            self._waits_skipped = min(skipped, _MAX_SKIPPED_WAITS)
            self._waits_to_skip = self._waits_skipped
        self._missing = set()
