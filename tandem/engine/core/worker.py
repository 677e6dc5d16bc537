"""The thread that runs the model: takes jobs, schedules a step, runs it, asks the head, delivers the results."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import Any, Generic

import torch

from tandem.engine.core.background import BackgroundJob, BackgroundWork
from tandem.engine.core.jobs import (
    Continue,
    Done,
    Failed,
    Head,
    Job,
    News,
    PayloadT,
    ResultT,
    StepRecord,
)
from tandem.engine.core.leads import Leads
from tandem.engine.core.scheduler import PageScheduler, RejoinWindow, next_segments
from tandem.engine.core.watchdog import StepWatchdog
from tandem.engine.kv_cache.sequence import Segment, Sequence, SequenceCache
from tandem.engine.settings import EngineSettings
from tandem.engine.steps import BranchRunner, StepRunner
from tandem.errors import InvalidRequestError, ServiceUnavailableError, TandemError
from tandem.types import Delta

logger = logging.getLogger(__name__)


class Worker(Generic[PayloadT, ResultT]):
    """Takes jobs, forms batches, runs steps. `submit`, `grant`, `put_back`, `release` and `stop` may be called from
    any thread."""

    def __init__(
        self,
        runner: StepRunner,
        cache: SequenceCache,
        head: Head[PayloadT, ResultT],
        settings: EngineSettings,
        tell: Callable[[News], None],
        device: torch.device,
        on_step: Callable[[StepRecord], None] | None,
        watchdog: StepWatchdog,
        branches: BranchRunner | None = None,
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._head = head
        self._chunk_tokens = settings.prefill_chunk_tokens
        self._device = device
        self._tell = tell
        self._on_step = on_step
        self._watchdog = watchdog
        self._thread = threading.Thread(target=self._work, name="tandem-engine", daemon=True)
        self._wakeup = threading.Condition()
        # Guarded by the condition: submissions from other threads.
        self._submitted: deque[Job[PayloadT]] = deque()
        self._granted: deque[tuple[Sequence, int, int]] = deque()
        self._put_back: deque[BackgroundJob] = deque()
        self._released: deque[Sequence] = deque()
        self._is_stopping = False
        self._rejoin = RejoinWindow(self._wakeup)
        # The thread's own.
        self._queued: deque[Job[PayloadT]] = deque()
        self._running: dict[Sequence, Job[PayloadT]] = {}
        """At most one job for each sequence, in the order in which they started."""
        self._ended: list[tuple[Job[PayloadT], object]] = []
        """Jobs that have ended since the last delivery, each with its result or exception."""
        self._background = BackgroundWork(runner, branches, on_step, self._watchdog, cache)
        self.leads = Leads()
        """Jobs that follow others by themselves."""
        self._pages = PageScheduler(cache, self._background.drop, self.leads.is_ahead)
        self._failed_steps = 0
        self._waits_for_pages = False
        """Every job does, and only news can change that."""

    @property
    def is_stopping(self) -> bool:
        """True if no more jobs are taken: after `stop`, or once the thread has failed."""
        return self._is_stopping

    @contextmanager
    def using_head(self, head: Head[Any, Any]) -> Iterator[None]:
        """Uses another head for as long as the block runs. No job is in flight when the block begins and ends."""
        own, self._head = self._head, head
        try:
            yield
        finally:
            self._head = own

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

    def submit(self, *jobs: Job[PayloadT]) -> None:
        """Submits jobs; they join the next step.

        Raises:
            ServiceUnavailableError: the thread has ended, or is about to.
        """
        with self._wakeup:
            self._check_running()
            self._submitted.extend(jobs)
            for job in jobs:
                self._rejoin.came_back(job.sequence)

    def grant(self, sequence: Sequence, asked: int, count: int) -> None:
        """Lets a sequence go on by itself. See `Leads.grant`."""
        with self._wakeup:
            self._granted.append((sequence, asked, count))
            self._rejoin.came_back(sequence)

    def put_back(self, job: BackgroundJob) -> None:
        """Submits background work, which runs while there is no job. A later job of its sequence ends it.

        Raises:
            ServiceUnavailableError: the thread has ended, or is about to.
        """
        with self._wakeup:
            self._check_running()
            self._put_back.append(job)
            self._wakeup.notify()

    def release(self, sequence: Sequence) -> None:
        """Submits a sequence for release, with `is_released` set."""
        with self._wakeup:
            self._released.append(sequence)
            self._rejoin.came_back(sequence)

    def _check_running(self) -> None:
        if self._is_stopping:
            raise ServiceUnavailableError("The engine is not running.")

    # ---- on the thread: taking work

    def _work(self) -> None:
        error: TandemError = ServiceUnavailableError("The engine is shutting down.")
        try:
            if self._device.type == "cuda" and self._device.index is not None:
                torch.cuda.set_device(self._device)  # a thread begins with the first GPU, which "cuda" means
            with torch.inference_mode():
                while self._take_work():
                    if not self._running:
                        self._background.run()
                        continue
                    began = time.perf_counter()
                    self._waits_for_pages = not self._step()
                    ended = time.perf_counter()
                    with self._wakeup:
                        answered = {job.sequence for job, _ in self._ended}
                        self._rejoin.expect(answered - self._running.keys(), began, ended)
                    self._deliver()
        except Exception:
            # A defect of the engine; no caller may hang because of it.
            logger.exception("engine thread died")
            error = ServiceUnavailableError("The engine has failed and must be restarted.")
        with self._wakeup:
            self._is_stopping = True
            self._queued.extend(self._submitted)
        for job in [*self._running.values(), *self._queued]:
            self._settle(job, error)
        self._deliver()
        self._tell(News(has_ended=True))

    def _take_work(self) -> bool:
        """Waits until there is something to run; false when the thread is to end."""
        while True:
            with self._wakeup:
                while not (self._has_work or self._has_news or self._is_stopping):
                    woken = self._wakeup.wait(self._pages.retry_seconds if self._waits_for_pages else None)
                    if not woken:
                        break  # other sequences have been idle for longer
                self._waits_for_pages = False
                if self._queued or self._submitted or self._running:
                    self._rejoin.wait(has_running=bool(self._running), is_stopping=lambda: self._is_stopping)
                # Before the jobs: a job that came later ends the background work of its sequence.
                while self._put_back:
                    self._background.add(self._put_back.popleft())
                self._queued.extend(self._submitted)
                self._submitted.clear()
                granted = list(self._granted)
                self._granted.clear()
                released = list(self._released)
                self._released.clear()
                if self._is_stopping:
                    return False
            for (
                sequence,
                asked,
                count,
            ) in granted:  # before the end of their leads, which counts what was asked for
                self._go_on(self.leads.grant(sequence, asked, 0 if sequence.is_released else count))
            for job in [job for job in self._running.values() if job.is_abandoned]:
                self._settle(job, _released_error())
            self._free(released)
            self._start_queued()
            self._deliver()
            if self._running or not self._background.is_empty:
                return True

    @property
    def _has_work(self) -> bool:
        """True if there is a job to run, or one that waited for another of its sequence, or background work."""
        if self._waits_for_pages:
            return False
        return bool(self._running or self._queued) or not self._background.is_empty

    @property
    def _has_news(self) -> bool:
        return bool(self._submitted or self._granted or self._put_back or self._released)

    def _free(self, sequences: SequenceOf[Sequence]) -> None:
        for sequence in sequences:
            self.leads.end(sequence)
            self._background.drop(sequence)
            self._cache.release(sequence)
        if sequences:
            self._tell(News(freed=sequences))

    def _start_queued(self) -> None:
        """Applies the deltas of jobs whose sequence is idle, or goes on by itself."""
        waiting: deque[Job[PayloadT]] = deque()
        for job in self._queued:
            if job.is_abandoned:
                self._settle(job, _released_error())
                continue
            if self.leads.end(job.sequence):
                self._running.pop(job.sequence, None)
            if job.sequence in self._running:
                waiting.append(job)
            else:
                self._start_job(job)
        self._queued = waiting

    def _go_on(self, job: Job[PayloadT] | None) -> None:
        """Starts a job that nobody submitted, if there is one."""
        if job is not None:
            self._start_job(job)

    def _start_job(self, job: Job[PayloadT]) -> None:
        sequence = job.sequence
        self._background.drop(sequence)
        try:
            sequence.apply(job.delta)
            self._cache.check_rows(sequence, job.row_count)
            sequence.want_rows(job.row_count)
        except InvalidRequestError as error:
            self._settle(job, error)
            return
        if sequence.pending_count:
            self._running[sequence] = job
            sequence.idle_since = math.inf
        else:
            self._settle(job, None)

    def _settle(self, job: Job[PayloadT], result: object) -> None:
        if self._running.get(job.sequence) is job:
            del self._running[job.sequence]
            job.sequence.idle_since = time.monotonic()
            job.sequence.is_new = False
        if isinstance(result, BaseException):
            self.leads.end(job.sequence)
        self._ended.append((job, result))

    def _deliver(self) -> None:
        """Delivers all results of a step at once: waking the event loop costs more than a result."""
        if self._ended:
            self._tell(News(results=self._ended))
            self._ended = []

    # ---- on the thread: a step

    def _step(self) -> bool:
        """Schedules and runs a step; false if every job waits for pages.

        What fails here fails for the callers of this step alone.
        """
        began = time.perf_counter()
        self._pages.reuse_prefixes(self._running.values())
        prompt_tokens = self._runner.prompt_tokens(self._chunk_tokens)
        segments = self._pages.with_pages(next_segments(self._running.values(), prompt_tokens))
        if not segments:
            return False
        jobs = [self._running[segment.sequence] for segment in segments]
        token_count = sum(segment.token_count for segment in segments)
        self._watchdog.begin(token_count)
        try:
            outcomes, row_count, model_end = self._run(segments, jobs)
        except Exception as error:
            logger.exception("step failed", extra={"sequences": len(jobs)})
            self._fail(jobs, error)
            self._failed_steps += 1
            # A failed device never recovers: the process has to be restarted
            if self._failed_steps >= 8:
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
        for job, outcome in outcomes:
            self._conclude(job, outcome)
        return True

    def _run(
        self, segments: SequenceOf[Segment], jobs: SequenceOf[Job[PayloadT]]
    ) -> tuple[list[tuple[Job[PayloadT], Done[ResultT] | Failed | Continue]], int, float]:
        """Runs the model and asks the head; returns outcomes, the number of rows and when the forward pass ended."""
        rows: list[int] = []
        """Indices of the step's tokens whose logits are wanted."""
        ready: list[Job[PayloadT]] = []
        """Jobs that they complete."""
        token_end = 0
        for segment, job in zip(segments, jobs, strict=True):
            token_end += segment.token_count
            if job.row_count and segment.end == segment.sequence.length:
                rows.extend(range(token_end - job.row_count, token_end))
                ready.append(job)
                if job.prepare is not None:
                    job.prepared = job.prepare(job)
        logits = self._runner.run(segments, rows)
        model_end = time.perf_counter()
        for segment, job in zip(segments, jobs, strict=True):
            segment.sequence.advance(segment.token_count)
            self._cache.computed(segment.sequence)
            if job.row_count == 0 and segment.sequence.pending_count == 0:
                self._settle(job, None)  # it wanted keys and values only
        outcomes = self._head(ready, logits) if ready else []
        return list(zip(ready, outcomes, strict=True)), len(rows), model_end

    def _conclude(self, job: Job[PayloadT], outcome: Done[ResultT] | Failed | Continue) -> None:
        if isinstance(outcome, Done):
            result, following = outcome.go_on() if outcome.go_on is not None else (outcome.result, None)
            self._settle(job, result)
            if following is not None:
                self._go_on(self.leads.follow(job, following))
        elif isinstance(outcome, Failed):
            self._cache.distrust(job.sequence)
            job.sequence.apply(Delta(0, ()))
            self._settle(job, outcome.error)
        else:
            job.row_count = 1
            try:
                job.sequence.append(outcome.token_id)
            except InvalidRequestError as error:
                self._settle(job, error)

    def _fail(self, jobs: SequenceOf[Job[PayloadT]], error: Exception) -> None:
        told = TandemError("The model's step failed; the service's log says why.")
        for job in jobs:
            if self._running.get(job.sequence) is job:
                self._settle(job, error if isinstance(error, TandemError) else told)


def _released_error() -> InvalidRequestError:
    return InvalidRequestError("The sequence was released.")
