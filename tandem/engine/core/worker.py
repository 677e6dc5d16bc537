"""The thread that runs the model."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager
from typing import Any, Generic

import torch

from tandem.engine.backends.branches import BranchRunner
from tandem.engine.core import page_scheduler
from tandem.engine.core.background.job import BackgroundJob
from tandem.engine.core.background.work import BackgroundWork
from tandem.engine.core.events import EngineObserver, StepRecord
from tandem.engine.core.jobs import Head, Job, PayloadT, ResultT
from tandem.engine.core.page_scheduler import PageScheduler
from tandem.engine.core.rejoin import RejoinWindow
from tandem.engine.core.runner import StepRunner
from tandem.engine.core.running import RunningJobs
from tandem.engine.core.step import Stepper
from tandem.engine.core.watchdog import StepWatchdog
from tandem.engine.kv_cache.paged_cache import PagedCache
from tandem.engine.kv_cache.sequence import Sequence
from tandem.engine.settings import EngineSettings
from tandem.errors import InvalidRequestError, ServiceUnavailableError, TandemError

logger = logging.getLogger(__name__)


class Worker(Generic[PayloadT, ResultT]):
    """Takes jobs, forms batches, runs steps. `submit`, `release` and `stop` may be called from any thread."""

    def __init__(
        self,
        runner: StepRunner,
        cache: PagedCache,
        head: Head[PayloadT, ResultT],
        settings: EngineSettings,
        observer: EngineObserver,
        device: torch.device,
        on_step: Callable[[StepRecord], None] | None,
        watchdog: StepWatchdog | None = None,
        branches: BranchRunner | None = None,
    ) -> None:
        self._cache = cache
        self._device = device
        self._observer = observer
        self._watchdog = watchdog or StepWatchdog()
        self._thread = threading.Thread(target=self._work, name="tandem-engine", daemon=True)
        self._wakeup = threading.Condition()
        # Guarded by the condition: submissions from other threads.
        self._submitted: deque[Job[PayloadT]] = deque()
        self._put_back: deque[BackgroundJob] = deque()
        self._released: deque[Sequence] = deque()
        self._is_stopping = False
        self._rejoin = RejoinWindow(self._wakeup)
        # The thread's own.
        self._queued: deque[Job[PayloadT]] = deque()
        self._running: RunningJobs[PayloadT] = RunningJobs(cache.distrust)
        self._background = BackgroundWork(runner, branches, on_step, self._watchdog, cache)
        pages = PageScheduler(cache, self._background.drop)
        self._stepper = Stepper(
            runner, head, settings.prefill_chunk_tokens, self._running, on_step, self._watchdog, cache, pages
        )  # fmt: skip
        self._waits_for_pages = False
        """Every job does, and only news can change that."""

    @property
    def is_stopping(self) -> bool:
        """True if no more jobs are taken: after `stop`, or once the thread has failed."""
        return self._is_stopping

    def using_head(self, head: Head[Any, Any]) -> AbstractContextManager[None]:
        """Uses another head for as long as a block runs. No job is in flight when the block begins and ends."""
        return self._stepper.using_head(head)

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
            if self._is_stopping:
                raise ServiceUnavailableError("The engine is not running.")
            self._submitted.extend(jobs)
            for job in jobs:
                self._rejoin.came_back(job.sequence)

    def put_back(self, job: BackgroundJob) -> None:
        """Submits background work, which runs while there is no job. A later job of its sequence ends it.

        Raises:
            ServiceUnavailableError: the thread has ended, or is about to.
        """
        with self._wakeup:
            if self._is_stopping:
                raise ServiceUnavailableError("The engine is not running.")
            self._put_back.append(job)
            self._wakeup.notify()

    def release(self, sequence: Sequence) -> None:
        """Submits a sequence for release, with `is_released` set."""
        with self._wakeup:
            self._released.append(sequence)
            self._rejoin.came_back(sequence)

    # ---- on the thread

    def _work(self) -> None:
        error: TandemError = ServiceUnavailableError("The engine is shutting down.")
        try:
            if self._device.type == "cuda" and self._device.index is not None:
                torch.cuda.set_device(self._device)  # a thread begins with the first GPU, which "cuda" means
            with torch.inference_mode():
                while self._take_work():
                    if not self._running.by_sequence:
                        self._background.run()
                        continue
                    began = time.perf_counter()
                    self._waits_for_pages = not self._stepper.run()
                    self._watchdog.end()
                    ended = time.perf_counter()
                    with self._wakeup:
                        self._rejoin.expect(self._running.ended_sequences, began, ended)
                    self._deliver()
        except Exception:
            # A defect of the engine; no caller may hang because of it.
            logger.exception("engine thread died")
            error = ServiceUnavailableError("The engine has failed and must be restarted.")
        with self._wakeup:
            self._is_stopping = True
            self._queued.extend(self._submitted)
        for job in [*self._running.by_sequence.values(), *self._queued]:
            self._running.settle(job, error)
        self._deliver()
        self._observer.ended()

    def _take_work(self) -> bool:
        """Waits until there is something to run; false when the thread is to end."""
        while True:
            with self._wakeup:
                while not (self._has_work or self._has_news or self._is_stopping):
                    woken = self._wakeup.wait(
                        page_scheduler.IDLE_SECONDS / 4 if self._waits_for_pages else None
                    )
                    if not woken:
                        break  # other sequences have been idle for longer
                self._waits_for_pages = False
                if self._queued or self._submitted or self._running.by_sequence:
                    self._rejoin.wait(
                        has_running=bool(self._running.by_sequence), is_stopping=lambda: self._is_stopping
                    )
                # Before the jobs: a job that came later ends the background work of its sequence.
                while self._put_back:
                    self._background.add(self._put_back.popleft())
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
            if self._running.by_sequence or not self._background.is_empty:
                return True

    @property
    def _has_work(self) -> bool:
        """True if there is a job to run, or one that waited for another of its sequence, or background work."""
        if self._waits_for_pages:
            return False
        return bool(self._running.by_sequence or self._queued) or not self._background.is_empty

    @property
    def _has_news(self) -> bool:
        """True if anything was submitted since the last check."""
        return bool(self._submitted or self._put_back or self._released)

    def _drop_abandoned(self) -> None:
        """Drops jobs that were cancelled or whose sequence was released."""
        for job in self._running.abandoned():
            self._running.settle(job, _released_error())

    def _free(self, sequences: SequenceOf[Sequence]) -> None:
        for sequence in sequences:
            self._background.drop(sequence)
            self._cache.release(sequence)
            self._observer.freed(sequence)

    def _start_queued(self) -> None:
        """Applies the deltas of jobs whose sequence is idle."""
        waiting: deque[Job[PayloadT]] = deque()
        for job in self._queued:
            if job.is_abandoned:
                self._running.settle(job, _released_error())
            elif job.sequence in self._running.by_sequence:
                waiting.append(job)
            else:
                self._start_job(job)
        self._queued = waiting

    def _start_job(self, job: Job[PayloadT]) -> None:
        sequence = job.sequence
        self._background.drop(sequence)
        try:
            sequence.apply(job.delta)
            self._cache.check_rows(sequence, job.row_count)
            sequence.want_rows(job.row_count)
        except InvalidRequestError as error:
            self._running.settle(job, error)
            return
        if sequence.pending_count:
            self._running.add(job)
        else:
            self._running.settle(job, None)

    def _deliver(self) -> None:
        """Delivers all results of a step at once: waking the event loop costs more than a result."""
        if ended := self._running.take_ended():
            self._observer.settled(ended)


def _released_error() -> InvalidRequestError:
    return InvalidRequestError("The sequence was released.")
