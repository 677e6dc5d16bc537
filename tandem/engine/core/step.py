"""One step of the engine: schedule, run, ask the head."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import Any, Generic

from torch import Tensor

from tandem.engine.core.events import StepRecord
from tandem.engine.core.jobs import Continue, Done, Failed, Head, Job, PayloadT, ResultT
from tandem.engine.core.page_scheduler import PageScheduler
from tandem.engine.core.runner import StepRunner
from tandem.engine.core.running import RunningJobs
from tandem.engine.core.scheduler import next_segments
from tandem.engine.core.watchdog import StepWatchdog
from tandem.engine.kv_cache.paged_cache import PagedCache
from tandem.engine.kv_cache.sequence import Segment
from tandem.errors import InvalidRequestError, TandemError

logger = logging.getLogger(__name__)

_MAX_FAILED_STEPS = 8
"""Failures in a row after which the engine gives up: a failed device never recovers, and the process has to be
restarted."""


class Stepper(Generic[PayloadT, ResultT]):
    """Runs steps of the running jobs, on the engine's thread."""

    def __init__(
        self,
        runner: StepRunner,
        head: Head[PayloadT, ResultT],
        prefill_chunk_tokens: int,
        running: RunningJobs[PayloadT],
        on_step: Callable[[StepRecord], None] | None,
        watchdog: StepWatchdog,
        cache: PagedCache,
        pages: PageScheduler,
    ) -> None:
        self._runner = runner
        self._head = head
        self._chunk_tokens = prefill_chunk_tokens
        self._running = running
        self._on_step = on_step
        self._watchdog = watchdog
        self._cache = cache
        self._pages = pages
        self._failed_steps = 0

    @contextmanager
    def using_head(self, head: Head[Any, Any]) -> Iterator[None]:
        """Use another head for as long as the block runs. No job is in flight when the block begins and ends."""
        own, self._head = self._head, head
        try:
            yield
        finally:
            self._head = own

    def run(self) -> bool:
        """Schedules and runs a step, and delivers the results; false if every job waits for pages.

        What fails here fails for the callers of this step alone.
        """
        began = time.perf_counter()
        segments = self._next_segments()
        if not segments:
            return False
        jobs = [self._running.by_sequence[segment.sequence] for segment in segments]
        token_count = sum(segment.token_count for segment in segments)
        self._watchdog.begin(token_count)
        try:
            row_count, model_end = self._step(segments, jobs)
        except Exception as error:
            logger.exception("step failed", extra={"sequences": len(jobs)})
            self._running.fail(jobs, _step_error(error))
            self._failed_steps += 1
            if self._failed_steps >= _MAX_FAILED_STEPS:
                raise
            return True
        finally:
            self._watchdog.end()
        self._failed_steps = 0
        seconds = time.perf_counter() - began
        if self._on_step is not None:
            self._on_step(StepRecord(len(jobs), token_count, row_count, model_end - began, seconds))
            # Once more: the observer takes part in how long a step takes.
            seconds = time.perf_counter() - began
        for job in jobs:
            job.count_step(seconds, len(jobs), token_count)
        return True

    def _next_segments(self) -> list[Segment]:
        jobs = self._running.by_sequence.values()
        self._pages.reuse_prefixes(jobs)
        return self._pages.with_pages(next_segments(jobs, self._runner.prompt_tokens(self._chunk_tokens)))

    def _step(self, segments: SequenceOf[Segment], jobs: SequenceOf[Job[PayloadT]]) -> tuple[int, float]:
        """Runs a step and asks the head; returns the number of rows and when the forward pass ended."""
        rows, ready = self._wanted_rows(segments)
        logits = self._runner.run(segments, rows)
        model_end = time.perf_counter()
        for segment in segments:
            segment.sequence.advance(segment.token_count)
            self._cache.computed(segment.sequence)
        self._finish_without_rows(jobs)
        self._ask_head(ready, logits)
        return len(rows), model_end

    def _wanted_rows(self, segments: SequenceOf[Segment]) -> tuple[list[int], list[Job[PayloadT]]]:
        """Indices of the step's tokens whose logits are wanted, and the jobs that they complete."""
        rows: list[int] = []
        ready = []
        token_end = 0
        for segment in segments:
            token_end += segment.token_count
            job = self._running.by_sequence[segment.sequence]
            if job.row_count and segment.end == segment.sequence.length:
                rows.extend(range(token_end - job.row_count, token_end))
                ready.append(job)
        return rows, ready

    def _finish_without_rows(self, jobs: SequenceOf[Job[PayloadT]]) -> None:
        """Ends jobs that wanted keys and values only, and have them."""
        for job in jobs:
            if job.row_count == 0 and job.sequence.pending_count == 0:
                self._running.settle(job, None)

    def _ask_head(self, ready: SequenceOf[Job[PayloadT]], logits: Tensor) -> None:
        if not ready:
            return
        for job, outcome in zip(ready, self._head(ready, logits), strict=True):
            if isinstance(outcome, Done):
                self._running.settle(job, outcome.result)
            elif isinstance(outcome, Failed):
                self._running.settle_untrusted(job, outcome)
            else:
                self._continue(job, outcome)

    def _continue(self, job: Job[PayloadT], outcome: Continue) -> None:
        job.row_count = 1
        try:
            job.sequence.append(outcome.token_id)
        except InvalidRequestError as error:
            self._running.settle(job, error)


def _step_error(error: Exception) -> TandemError:
    if isinstance(error, TandemError):
        return error
    return TandemError("The model's step failed; the service's log says why.")
