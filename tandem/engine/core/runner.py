"""Runs each step by the first backend that accepts it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from torch import Tensor

from tandem.engine.backends.interface import StepBackend
from tandem.engine.kv_cache.sequence import Segment


class StepRunner:
    """An ordered list of step backends, fastest first; the last accepts every step."""

    def __init__(self, backends: SequenceOf[StepBackend]) -> None:
        self.backends = tuple(backends)

    @property
    def warm_up_steps(self) -> SequenceOf[tuple[int, ...]]:
        """Steps for which some backend prepares something, smallest first; see `StepBackend`."""
        return sorted({step for backend in self.backends for step in backend.warm_up_steps}, key=sum)

    def prompt_tokens(self, limit: int) -> int:
        """The number of prompt tokens, up to `limit`, that a step should take."""
        return min(backend.prompt_tokens(limit) for backend in self.backends)

    def run(self, segments: SequenceOf[Segment], rows: SequenceOf[int]) -> Tensor:
        """Runs one step; see `StepBackend.run`."""
        backend = next(backend for backend in self.backends if backend.accepts(segments))
        return backend.run(segments, rows)
