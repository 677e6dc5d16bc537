"""News of the engine's thread: a record of each step, and what became of jobs and sequences."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Protocol

from tandem.engine.core.jobs import Job
from tandem.engine.kv_cache.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Record of one step."""

    sequence_count: int
    token_count: int
    row_count: int
    model_seconds: float
    """Time in the forward pass."""
    seconds: float
    """Time in all, the head included."""


class EngineObserver(Protocol):
    """Receives events of the engine's thread, on that thread."""

    def settled(self, results: SequenceOf[tuple[Job[Any], object]]) -> None:
        """Jobs have ended, each with a result or an exception."""

    def freed(self, sequence: Sequence) -> None:
        """A released sequence is out of use."""

    def ended(self) -> None:
        """The thread ends; nothing more will be done."""
