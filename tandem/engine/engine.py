"""One model, one thread that runs it, many sequences."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Generic, cast

import torch
from torch import Tensor

from tandem.engine.admission import Admission
from tandem.engine.cache import KvUsage, arena_tokens
from tandem.engine.jobs import Continue, Done, Head, Job, PayloadT, ResultT
from tandem.engine.layout import Packing
from tandem.engine.model import LoadedModel
from tandem.engine.runner import StepRunner
from tandem.engine.scheduler import next_segments
from tandem.engine.sequence import Sequence
from tandem.engine.settings import EngineSettings
from tandem.errors import ConfigurationError, InvalidRequestError, ServiceUnavailableError, TandemError

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_SECONDS = 30.0


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


class Engine(Generic[PayloadT, ResultT]):
    """Runs jobs in batches on a thread of its own, so that the event loop never runs a forward pass.

    Everything but the thread's own loop is called from the event loop that called `start`.
    """

    def __init__(
        self,
        model: LoadedModel,
        head: Head[PayloadT, ResultT],
        settings: EngineSettings,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        """Allocates the KV cache.

        Args:
            model: what to run.
            head: what the logits mean.
            settings: limits.
            on_step: told of each step, on the engine's thread; for metrics.

        Raises:
            ConfigurationError: the settings cannot be met.
        """
        self.model = model
        self.max_length = _max_length(model, settings)
        """Longest sequence, in tokens."""
        self._settings = settings
        self._head = head
        self._on_step = on_step
        total_tokens = arena_tokens(model.layers, settings, self.max_length, model.dtype, model.device)
        self._runner = StepRunner(model, total_tokens)
        self._admission = Admission(
            total_tokens, settings.max_sequences, settings.max_waiting, model.info.vocabulary_size
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="tandem-engine", daemon=True)
        self._wakeup = threading.Condition()
        # Guarded by the condition: what the event loop hands to the thread.
        self._inbox: deque[Job[PayloadT]] = deque()
        self._releases: deque[Sequence] = deque()
        self._is_closing = False
        # The thread's own.
        self._queued: deque[Job[PayloadT]] = deque()
        self._running: dict[Sequence, Job[PayloadT]] = {}
        self._settled: list[tuple[Job[PayloadT], object]] = []

    # ---- the event loop's side

    def start(self) -> None:
        """Starts the thread. Must be called with an event loop running, once."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """Stops after the step in progress; whoever still waits gets a ServiceUnavailableError."""
        with self._wakeup:
            self._is_closing = True
            self._wakeup.notify()
        self._admission.refuse_waiting()
        if self._loop is None:
            return
        await asyncio.to_thread(self._thread.join, _CLOSE_TIMEOUT_SECONDS)
        if self._thread.is_alive():
            logger.error("engine thread did not stop", extra={"timeout_seconds": _CLOSE_TIMEOUT_SECONDS})

    async def open(self, max_length: int) -> Sequence:
        """A new, empty sequence with room for `max_length` tokens; waits for room, first come, first served.

        Raises:
            InvalidRequestError: `max_length` is more than the engine serves, or less than 1.
            CapacityError: there is no room and too many wait already.
            ServiceUnavailableError: the engine is closing.
        """
        if not 1 <= max_length <= self.max_length:
            raise InvalidRequestError(
                f"A sequence of up to {max_length} tokens was asked for; this model serves 1 to {self.max_length}."
            )
        self._check_open()
        return await self._admission.open(max_length)

    def release(self, sequence: Sequence) -> None:
        """Gives the sequence's room back, before the next step. Jobs of it that are in flight are dropped."""
        if sequence.is_released:
            return
        sequence.is_released = True
        with self._wakeup:
            self._releases.append(sequence)
            self._wakeup.notify()

    async def run(self, job: Job[PayloadT]) -> ResultT:
        """Runs a job and returns what the head makes of it. Cancelling the caller drops the job.

        Jobs of one sequence run one after the other.

        Raises:
            InvalidRequestError: the delta does not fit the sequence.
            ServiceUnavailableError: the engine is closing.
            TandemError: the step failed.
        """
        self._check_open()
        if job.sequence.is_released:
            raise _released_error()
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        job.future = future
        with self._wakeup:
            self._inbox.append(job)
            self._wakeup.notify()
        try:
            return cast(ResultT, await future)
        except asyncio.CancelledError:
            job.is_cancelled = True
            raise

    @property
    def usage(self) -> KvUsage:
        """What the KV cache holds, and how many wait for it."""
        return self._admission.usage()

    def _check_open(self) -> None:
        if self._is_closing or self._loop is None:
            raise ServiceUnavailableError("The engine is not running.")

    # ---- the thread's side

    def _work(self) -> None:
        with torch.inference_mode():
            while self._take_work():
                self._step()
                self._deliver()
        self._fail(
            [*self._running.values(), *self._queued], ServiceUnavailableError("The engine is shutting down.")
        )
        self._deliver()

    def _take_work(self) -> bool:
        """Waits until there is something to run; false when the engine closes."""
        while True:
            with self._wakeup:
                while not (self._inbox or self._releases or self._running or self._is_closing):
                    self._wakeup.wait()
                self._queued.extend(self._inbox)
                self._inbox.clear()
                releases = list(self._releases)
                self._releases.clear()
                if self._is_closing:
                    return False
            self._drop_abandoned()
            self._start_queued()
            self._give_back(releases)
            self._deliver()
            if self._running:
                return True

    def _drop_abandoned(self) -> None:
        """Forgets jobs that nobody waits for or whose sequence is gone."""
        gone = [job for job in self._running.values() if job.is_cancelled or job.sequence.is_released]
        for job in gone:
            del self._running[job.sequence]
        self._fail(gone, _released_error())

    def _start_queued(self) -> None:
        """Applies the deltas of jobs whose sequence is idle."""
        waiting: deque[Job[PayloadT]] = deque()
        for job in self._queued:
            if job.is_cancelled or job.sequence.is_released:
                self._fail([job], _released_error())
            elif job.sequence in self._running:
                waiting.append(job)
            else:
                self._start_job(job)
        self._queued = waiting

    def _start_job(self, job: Job[PayloadT]) -> None:
        try:
            job.sequence.apply(job.delta)
            job.sequence.want_rows(job.row_count)
        except InvalidRequestError as error:
            self._settled.append((job, error))
            return
        if job.sequence.pending_count:
            self._running[job.sequence] = job
        else:
            self._settled.append((job, None))

    def _give_back(self, releases: SequenceOf[Sequence]) -> None:
        if releases:
            self._call_loop(self._close_sequences, releases)

    def _step(self) -> None:
        """Schedule, run, hand out."""
        started = time.perf_counter()
        packing = self._runner.pack(
            next_segments(self._running.values(), self._settings.prefill_chunk_tokens)
        )
        jobs = [self._running[segment.sequence] for segment in packing.segments]
        try:
            rows, ready = _wanted_rows(packing, jobs)
            logits = self._runner.run(packing, rows)
            model_seconds = time.perf_counter() - started
            for segment in packing.segments:
                segment.sequence.advance(segment.token_count)
            self._finish(jobs)
            self._ask_head(ready, logits)
        except Exception as error:
            # Whatever went wrong belongs to those who wait for this step; the engine goes on for the others.
            logger.exception("step failed", extra={"sequences": len(jobs)})
            self._drop(jobs, _step_error(error))
            return
        if self._on_step is not None:
            seconds = time.perf_counter() - started
            self._on_step(StepRecord(len(jobs), packing.token_count, len(rows), model_seconds, seconds))

    def _finish(self, jobs: SequenceOf[Job[PayloadT]]) -> None:
        """Settles jobs that wanted no rows and are through."""
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

    def _drop(self, jobs: SequenceOf[Job[PayloadT]], error: TandemError) -> None:
        """Ends those of the jobs that still run."""
        for job in jobs:
            if self._running.get(job.sequence) is job:
                self._settle(job, error)

    def _fail(self, jobs: SequenceOf[Job[PayloadT]], error: TandemError) -> None:
        self._settled.extend((job, error) for job in jobs)

    def _deliver(self) -> None:
        """Hands results to the event loop, all of a step at once: waking it costs more than a result."""
        if self._settled:
            settled, self._settled = self._settled, []
            self._call_loop(_resolve, settled)

    def _close_sequences(self, sequences: SequenceOf[Sequence]) -> None:
        for sequence in sequences:
            self._admission.close(sequence)

    def _call_loop(self, function: Callable[..., None], *args: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)


def _max_length(model: LoadedModel, settings: EngineSettings) -> int:
    if settings.max_length is None:
        return model.info.max_length
    if settings.max_length > model.info.max_length:
        raise ConfigurationError(
            f"max_length is {settings.max_length}, but the model {model.info.name} was made for at most "
            f"{model.info.max_length} tokens."
        )
    return settings.max_length


def _wanted_rows(packing: Packing, jobs: SequenceOf[Job[PayloadT]]) -> tuple[list[int], list[Job[PayloadT]]]:
    """Indices of the packed tokens whose logits are wanted, and the jobs that they complete."""
    rows: list[int] = []
    ready = []
    token_end = 0
    for segment, job in zip(packing.segments, jobs, strict=True):
        token_end += segment.token_count
        if job.row_count and segment.end == job.sequence.length:
            rows.extend(range(token_end - job.row_count, token_end))
            ready.append(job)
    return rows, ready


def _resolve(settled: SequenceOf[tuple[Job[PayloadT], object]]) -> None:
    for job, result in settled:
        if job.future is None or job.future.done():
            continue  # cancelled meanwhile
        if isinstance(result, BaseException):
            job.future.set_exception(result)
        else:
            job.future.set_result(result)


def _step_error(error: Exception) -> TandemError:
    if isinstance(error, TandemError):
        return error
    return TandemError(
        f"The model's step failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    )


def _released_error() -> InvalidRequestError:
    return InvalidRequestError("The sequence was released.")
