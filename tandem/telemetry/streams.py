"""The observer interface of a servicer's streams. These classes observe nothing; telemetry overrides them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from tandem.engine.core.jobs import StepRecord
    from tandem.engine.interface import KvUsage

OnStep: TypeAlias = "Callable[[StepRecord], None] | None"
"""Called for each step of an engine, on the engine's thread; None: no observer."""


class SequenceObserver:
    """Counts and times one sequence of a stream."""

    def __init__(self, on_answer: Callable[[float], None] = lambda _: None) -> None:
        """`on_answer` receives the seconds of each step."""
        self._on_answer = on_answer
        self._began = self._asked = time.perf_counter()
        self.queue_seconds = self.step_seconds = 0.0
        self.steps = self.tokens = 0
        self.prefill_began = self.prefill_ended = math.inf
        """When the first step, which reads the prompt, arrived and was answered, by the clock of `perf_counter`."""

    def opened(self) -> None:
        self.queue_seconds = time.perf_counter() - self._began

    def step_arrived(self) -> None:
        self._asked = time.perf_counter()
        self.prefill_began = min(self.prefill_began, self._asked)
        self.steps += 1

    def answered(self, token_count: int) -> None:
        """The answer to the step is ready, with so many tokens or rows."""
        now = time.perf_counter()
        self.prefill_ended = min(self.prefill_ended, now)
        self.step_seconds += now - self._asked
        self.tokens += token_count
        self._on_answer(now - self._asked)

    def led(self, token_count: int) -> None:
        """The answer to a step that nobody had asked for is ready."""
        self.steps += 1
        self.tokens += token_count


class ServiceObserver:
    """Observes a draft or target service."""

    on_step: OnStep = None

    def start(self) -> None:
        """The service begins to start."""

    def ready(self, model_name: str, kv_usage: Callable[[], KvUsage | None]) -> None:
        """The service is ready. `kv_usage` returns the usage of its KV cache, if it has one, on the event loop."""

    def waits(self, steps: Callable[[], float]) -> None:
        """A draft is ready; `steps` returns what a question waits at present, in steps of its profile."""

    @contextmanager
    def stream(self, request_id: str, traceparent: str) -> Iterator[SequenceObserver]:
        """Observe a stream for as long as the block lasts."""
        yield SequenceObserver()

    async def close(self) -> None:
        """The service ends."""


NO_SERVICE_OBSERVER = ServiceObserver()
