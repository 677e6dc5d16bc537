"""The thread that runs the model."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Generic, Protocol

import torch
from torch import Tensor

from tandem.engine.extents import Extent
from tandem.engine.jobs import Continue, Done, Head, Job, PayloadT, ResultT, RunAhead
from tandem.engine.layout import Packing
from tandem.engine.prefixes import PrefixIndex
from tandem.engine.runner import StepRunner
from tandem.engine.scheduler import next_segments
from tandem.engine.segment import Segment
from tandem.engine.sequence import Sequence
from tandem.engine.settings import EngineSettings
from tandem.errors import InvalidRequestError, ServiceUnavailableError, TandemError

logger = logging.getLogger(__name__)

_PATIENCE = 0.3
"""Share of a step's time for which the next one waits for the sequences that the step has answered.

They are back within a round trip, and a step without them costs nearly as much as one with them. Without any patience
whoever is back first goes alone, the others follow together, and from then on each token pays for two steps.
docs/engine.md has what was measured.
"""
_MOST_STEPS_WITHOUT_WAITING = 63
"""When waiting was in vain it is left out for one step, then three, then seven, up to so many."""
_MOST_FAILED_STEPS = 8
"""In a row. A device that has failed fails for ever; whoever runs the process has to start it again."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did."""

    sequence_count: int
    token_count: int
    row_count: int
    model_seconds: float
    """Time in the forward pass."""
    seconds: float
    """Time in all, the head included."""


class Listener(Protocol):
    """Told of what the thread has done, on the thread."""

    def settled(self, results: SequenceOf[tuple[Job[Any], object]]) -> None:
        """Jobs have ended, each with a result or an exception."""

    def freed(self, sequence: Sequence, kept: Extent | None) -> None:
        """A released sequence is out of use; `kept` still holds a prefix that may be reused."""

    def reused(self, extent: Extent) -> None:
        """The prefix in `extent` was taken over by a new sequence."""

    def ended(self) -> None:
        """The thread ends; nothing more will be done."""


class Worker(Generic[PayloadT, ResultT]):
    """Takes jobs, forms batches, runs steps. `submit`, `release` and `stop` may be called from any thread."""

    def __init__(
        self,
        runner: StepRunner,
        head: Head[PayloadT, ResultT],
        settings: EngineSettings,
        listener: Listener,
        on_step: Callable[[StepRecord], None] | None,
        run_ahead: RunAhead[PayloadT, ResultT] | None = None,
    ) -> None:
        self._runner = runner
        self._head = head
        self._chunk_tokens = settings.prefill_chunk_tokens
        self._reuses_prefixes = settings.prefix_reuse
        self._listener = listener
        self._on_step = on_step
        self._run_ahead = run_ahead
        self._thread = threading.Thread(target=self._work, name="tandem-engine", daemon=True)
        self._wakeup = threading.Condition()
        # Guarded by the condition: what others hand to the thread.
        self._submitted: deque[Job[PayloadT]] = deque()
        self._released: deque[Sequence] = deque()
        self._is_stopping = False
        # The thread's own.
        self._queued: deque[Job[PayloadT]] = deque()
        self._running: dict[Sequence, Job[PayloadT]] = {}
        self._settled: list[tuple[Job[PayloadT], object]] = []
        self._prefixes = PrefixIndex()
        self._missing: set[Sequence] = set()
        """Whom the last step has answered and who are not back yet. Guarded by the condition."""
        self._wait_until = 0.0
        self._awaits_missing = False
        self._steps_without_waiting = 0
        self._steps_until_waiting = 0
        self._failed_steps = 0

    @property
    def is_stopping(self) -> bool:
        """Whether no more jobs are taken: after `stop`, or once the thread has failed."""
        return self._is_stopping

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Asks the thread to end after the step in progress."""
        with self._wakeup:
            self._is_stopping = True
            self._wakeup.notify()

    def join(self, timeout_seconds: float) -> bool:
        """Waits for the thread to end; false when it has not."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def submit(self, job: Job[PayloadT]) -> None:
        """Hands in a job; it joins the next step.

        Raises:
            ServiceUnavailableError: the thread has ended, or is about to.
        """
        with self._wakeup:
            if self._is_stopping:
                raise ServiceUnavailableError("The engine is not running.")
            self._submitted.append(job)
            self._came_back(job.sequence)

    def release(self, sequence: Sequence) -> None:
        """Hands in a sequence that is not needed any more, `is_released` set."""
        with self._wakeup:
            self._released.append(sequence)
            self._came_back(sequence)

    def _came_back(self, sequence: Sequence) -> None:
        """Wakes the thread, with the condition held; not for each of many that it waits for."""
        self._missing.discard(sequence)
        if not (self._awaits_missing and self._missing):
            self._wakeup.notify()

    # ---- on the thread

    def _work(self) -> None:
        error: TandemError = ServiceUnavailableError("The engine is shutting down.")
        try:
            with torch.inference_mode():
                while self._take_work():
                    started = time.perf_counter()
                    self._step()
                    self._expect_back(started)
                    self._deliver()
        except Exception:
            # A mistake of ours; nothing may hang because of it.
            logger.exception("engine thread died")
            error = ServiceUnavailableError("The engine has failed and must be restarted.")
        with self._wakeup:
            self._is_stopping = True
            self._queued.extend(self._submitted)
        self._fail([*self._running.values(), *self._queued], error)
        self._deliver()
        self._listener.ended()

    def _take_work(self) -> bool:
        """Waits until there is something to run; false when the thread is to end."""
        while True:
            with self._wakeup:
                while not (self._has_work or self._submitted or self._released or self._is_stopping):
                    self._wakeup.wait()
                self._await_answered()
                self._queued.extend(self._submitted)
                self._submitted.clear()
                released = list(self._released)
                self._released.clear()
                if self._is_stopping:
                    return False
            self._drop_abandoned()
            self._free(released)
            self._start_queued()
            self._deliver()
            if self._running:
                return True

    def _await_answered(self) -> None:
        """With the condition held and work at hand: give those whom the last step has answered a moment to return."""
        if self._steps_until_waiting > 0 or self._running:
            self._steps_until_waiting = max(0, self._steps_until_waiting - 1)
        elif self._missing:
            self._awaits_missing = True
            while self._missing and not self._is_stopping and time.perf_counter() < self._wait_until:
                self._wakeup.wait(self._wait_until - time.perf_counter())
            self._awaits_missing = False
            steps = 2 * self._steps_without_waiting + 1 if self._missing else 0
            self._steps_without_waiting = min(steps, _MOST_STEPS_WITHOUT_WAITING)
            self._steps_until_waiting = self._steps_without_waiting
        self._missing = set()

    @property
    def _has_work(self) -> bool:
        """Whether there is a job to run, or one that waited for another of its sequence."""
        return bool(self._running or self._queued)

    def _drop_abandoned(self) -> None:
        """Forgets jobs that nobody waits for or whose sequence is gone."""
        gone = [job for job in self._running.values() if job.is_abandoned]
        for job in gone:
            del self._running[job.sequence]
        self._fail(gone, _released_error())

    def _free(self, sequences: SequenceOf[Sequence]) -> None:
        for sequence in sequences:
            kept = self._prefixes.leave(sequence) if self._reuses_prefixes else None
            self._listener.freed(sequence, kept)

    def _start_queued(self) -> None:
        """Applies the deltas of jobs whose sequence is idle."""
        waiting: deque[Job[PayloadT]] = deque()
        for job in self._queued:
            if job.is_abandoned:
                self._fail([job], _released_error())
            elif job.sequence in self._running:
                waiting.append(job)
            else:
                self._start_job(job)
        self._queued = waiting

    def _start_job(self, job: Job[PayloadT]) -> None:
        sequence = job.sequence
        is_new = sequence.length == 0
        try:
            sequence.apply(job.delta)
            if is_new and sequence.length and self._reuses_prefixes:
                self._take_over_prefix(sequence)
            sequence.want_rows(job.row_count)
        except InvalidRequestError as error:
            self._settled.append((job, error))
            return
        if sequence.pending_count:
            self._running[sequence] = job
        else:
            self._settled.append((job, None))

    def _take_over_prefix(self, sequence: Sequence) -> None:
        """Spares the sequence the computing of what another one has computed."""
        match = self._prefixes.find(sequence.token_ids)
        if match is not None:
            self._runner.arena.copy(match.extent.start, sequence.extent.start, match.length)
            sequence.advance(match.length)
            self._listener.reused(match.extent)
        self._prefixes.enter(sequence)

    def _step(self) -> None:
        """Schedule, run, hand out."""
        started = time.perf_counter()
        segments = next_segments(self._running.values(), self._runner.prompt_tokens(self._chunk_tokens))
        jobs = [self._running[segment.sequence] for segment in segments]
        try:
            if self._finish_ahead(segments, jobs, started):
                self._failed_steps = 0
                return
            packing = self._runner.pack(segments)
            rows, ready = self._wanted_rows(packing)
            logits = self._runner.run(packing, rows)
            model_seconds = time.perf_counter() - started
            for segment in segments:
                segment.sequence.advance(segment.token_count)
            self._finish_without_rows(jobs)
            self._ask_head(ready, logits)
        except Exception as error:
            # Whatever went wrong belongs to those who wait for this step; the engine goes on for the others.
            logger.exception("step failed", extra={"sequences": len(jobs)})
            self._fail_running(jobs, _step_error(error))
            self._failed_steps += 1
            if self._failed_steps >= _MOST_FAILED_STEPS:
                raise
            return
        self._failed_steps = 0
        if self._on_step is not None:
            seconds = time.perf_counter() - started
            self._on_step(StepRecord(len(jobs), packing.token_count, len(rows), model_seconds, seconds))

    def _finish_ahead(
        self, segments: SequenceOf[Segment], jobs: SequenceOf[Job[PayloadT]], started: float
    ) -> bool:
        """Finishes all jobs at once where that is possible; whether it was."""
        results = None if self._run_ahead is None else self._run_ahead.run(segments, jobs)
        if results is None:
            return False
        for job, result in zip(jobs, results, strict=True):
            self._settle(job, result)
        if self._on_step is not None:
            seconds = time.perf_counter() - started
            token_count = sum(segment.token_count for segment in segments)
            self._on_step(StepRecord(len(jobs), token_count, len(jobs), seconds, seconds))
        return True

    def _wanted_rows(self, packing: Packing) -> tuple[list[int], list[Job[PayloadT]]]:
        """Indices of the packed tokens whose logits are wanted, and the jobs that they complete."""
        rows: list[int] = []
        ready = []
        token_end = 0
        for segment in packing.segments:
            token_end += segment.token_count
            job = self._running[segment.sequence]
            if job.row_count and segment.end == segment.sequence.length:
                rows.extend(range(token_end - job.row_count, token_end))
                ready.append(job)
        return rows, ready

    def _finish_without_rows(self, jobs: SequenceOf[Job[PayloadT]]) -> None:
        """Ends jobs that wanted keys and values only, and have them."""
        for job in jobs:
            if job.row_count == 0 and job.sequence.pending_count == 0:
                self._settle(job, None)

    def _ask_head(self, ready: SequenceOf[Job[PayloadT]], logits: Tensor) -> None:
        if not ready:
            return
        for job, outcome in zip(ready, self._head(ready, logits), strict=True):
            if isinstance(outcome, Done):
                self._settle(job, outcome.result)
            else:
                self._continue(job, outcome)

    def _continue(self, job: Job[PayloadT], outcome: Continue) -> None:
        job.row_count = 1
        try:
            job.sequence.append(outcome.token_id)
        except InvalidRequestError as error:
            self._settle(job, error)

    def _settle(self, job: Job[PayloadT], result: object) -> None:
        """Ends a running job with a result or an exception."""
        del self._running[job.sequence]
        self._settled.append((job, result))

    def _fail_running(self, jobs: SequenceOf[Job[PayloadT]], error: TandemError) -> None:
        """Ends those of the jobs that still run."""
        for job in jobs:
            if self._running.get(job.sequence) is job:
                self._settle(job, error)

    def _fail(self, jobs: SequenceOf[Job[PayloadT]], error: TandemError) -> None:
        self._settled.extend((job, error) for job in jobs)

    def _deliver(self) -> None:
        """Hands results over, all of a step at once: waking the event loop costs more than a result."""
        if self._settled:
            settled, self._settled = self._settled, []
            self._listener.settled(settled)

    def _expect_back(self, started: float) -> None:
        """Notes whom a step that began at `started` has answered, before they know."""
        ended = time.perf_counter()
        self._wait_until = ended + _PATIENCE * (ended - started)
        with self._wakeup:
            self._missing = {job.sequence for job, _ in self._settled if not job.sequence.is_released}


def _step_error(error: Exception) -> TandemError:
    if isinstance(error, TandemError):
        return error
    return TandemError("The model's step failed; the service's log says why.")


def _released_error() -> InvalidRequestError:
    return InvalidRequestError("The sequence was released.")
