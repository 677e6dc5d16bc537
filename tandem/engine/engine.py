"""One model, one thread that runs it, many sequences: what the services call."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, Generic, cast

from tandem.engine.admission import Admission
from tandem.engine.buckets import Bucket, make_buckets
from tandem.engine.cache import KvUsage, arena_tokens
from tandem.engine.extents import Extent
from tandem.engine.jobs import Head, Job, PayloadT, ResultT, RunAhead
from tandem.engine.model import LoadedModel
from tandem.engine.recording import Recorder
from tandem.engine.rope import fix_rotary_frequencies
from tandem.engine.runner import SMALL_STEP_TOKENS, StepRunner
from tandem.engine.sequence import Sequence
from tandem.engine.settings import EngineSettings
from tandem.engine.worker import StepRecord, Worker
from tandem.errors import ConfigurationError, InvalidRequestError, ServiceUnavailableError
from tandem.types import Delta

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_SECONDS = 30.0
_WARM_UP_SECONDS = 5.0
"""All sizes of a model of 200 million parameters on two cores; a larger one gets its small steps, whatever the time."""


MakeRunAhead = Callable[[StepRunner, SequenceOf[Bucket], Recorder], RunAhead[PayloadT, ResultT]]
"""Makes what does several steps of an engine at once."""


class Engine(Generic[PayloadT, ResultT]):
    """Runs jobs in batches on a thread of its own, so that the event loop never runs a forward pass.

    Belongs to the event loop that calls `start`; any number of its tasks may use it.
    """

    def __init__(
        self,
        model: LoadedModel,
        head: Head[PayloadT, ResultT],
        settings: EngineSettings,
        on_step: Callable[[StepRecord], None] | None = None,
        *,
        recorder: Recorder | None = None,
        make_run_ahead: MakeRunAhead[PayloadT, ResultT] | None = None,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        """Allocates the KV cache.

        Args:
            model: what to run. Its rotary frequencies are fixed for the longest sequence, see `tandem.engine.rope`.
            head: what the logits mean.
            settings: limits.
            on_step: told of each step, on the engine's thread; for metrics.
            recorder: records steps of the settings' widths; None runs all of them eagerly.
            make_run_ahead: makes what does several steps at once, with what records it and the buckets of its first
                step; asked for only with a recorder.
            on_failure: told, on the event loop, that the thread has ended by itself: nothing will run any more.

        Raises:
            ConfigurationError: the settings cannot be met.
        """
        self.model = model
        self.max_length = _max_length(model, settings)
        """Longest sequence, in tokens."""
        total_tokens = arena_tokens(model.layers, settings, self.max_length, model.dtype, model.device)
        fix_rotary_frequencies(model.module, self.max_length, model.device)
        self._admission = Admission(
            total_tokens, settings.max_sequences, settings.max_waiting, model.info.vocabulary_size
        )
        runner = self._runner = StepRunner(model, total_tokens)
        run_ahead = None
        if recorder is not None and model.is_packed:
            buckets = make_buckets(settings.max_sequences, self.max_length, settings.recorded_widths)
            runner.record(buckets, recorder)
            run_ahead = None if make_run_ahead is None else make_run_ahead(runner, buckets, recorder)
        self._worker = Worker(runner, head, settings, _ToLoop(self), on_step, run_ahead)
        self._on_failure = on_failure
        self._is_closing = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Starts the thread. Must be called with an event loop running, once."""
        self._loop = asyncio.get_running_loop()
        self._worker.start()

    async def close(self) -> None:
        """Stops after the step in progress; whoever still waits gets a ServiceUnavailableError."""
        if self._loop is None:
            return
        self._is_closing = True
        self._worker.stop()
        self._admission.refuse_waiting()
        if not await asyncio.to_thread(self._worker.join, _CLOSE_TIMEOUT_SECONDS):
            logger.error("engine thread did not stop", extra={"timeout_seconds": _CLOSE_TIMEOUT_SECONDS})

    async def warm_up(self) -> None:
        """Runs steps of several sizes, so that the first requests do not pay for what is set up when a size is first
        wanted; of a large model only the small ones, which are all that the time allows for."""
        ends = time.perf_counter() + _WARM_UP_SECONDS
        sizes = self._runner.warm_up_sizes
        sequence = await self.open(min(sizes[-1], self.max_length))
        try:
            for size in sizes:
                began = time.perf_counter()
                if size > sequence.max_length:
                    break
                # Another token each time, or it would be known already.
                token_ids = (size % self.model.info.vocabulary_size,) * size
                await self._submit(Job(sequence, Delta(0, token_ids), 0, None))
                ended = time.perf_counter()
                if size >= SMALL_STEP_TOKENS and ended + 2 * (ended - began) > ends:
                    break
            await self._submit(Job(sequence, Delta(0, (0,)), 0, None))  # of more a prefix would be kept
        finally:
            self.release(sequence)

    async def open(self, max_length: int) -> Sequence:
        """A new, empty sequence with room for `max_length` tokens; waits for room, first come, first served.

        Every sequence must be given back with `release`, whatever happens.

        Raises:
            InvalidRequestError: `max_length` is more than the engine serves, or less than 1.
            CapacityError: there is no room and too many wait already.
            ServiceUnavailableError: the engine is closing.
        """
        self._check_running()
        if not 1 <= max_length <= self.max_length:
            raise InvalidRequestError(
                f"A sequence of up to {max_length} tokens was asked for; this model serves 1 to {self.max_length}."
            )
        return await self._admission.open(max_length)

    def release(self, sequence: Sequence) -> None:
        """Gives the sequence's room back, before the next step. Jobs of it that are in flight are dropped."""
        if not sequence.is_released:
            sequence.is_released = True
            self._worker.release(sequence)

    async def run(self, job: Job[PayloadT]) -> ResultT:
        """Runs a job and returns what the head makes of it. Cancelling the caller drops the job before the next step.

        Jobs of one sequence run one after the other; a job object is run once.

        Raises:
            InvalidRequestError: the delta does not fit the sequence, or the sequence was released.
            ServiceUnavailableError: the engine is closing.
            TandemError: the step failed.
        """
        return cast(ResultT, await self._submit(job))

    @property
    def is_running(self) -> bool:
        """Whether requests are taken: between `start` and `close`, unless the thread has failed."""
        return self._loop is not None and not self._worker.is_stopping

    @property
    def usage(self) -> KvUsage:
        """What the KV cache holds, and how many wait for it."""
        return self._admission.usage()

    async def _submit(self, job: Job[Any]) -> object:
        self._check_running()
        if job.sequence.is_released:
            raise InvalidRequestError("The sequence was released.")
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        job.future = future
        self._worker.submit(job)
        try:
            return await future
        except asyncio.CancelledError:
            job.is_cancelled = True
            raise

    def _check_running(self) -> None:
        if not self.is_running:
            raise ServiceUnavailableError("The engine is not running.")

    def _ended(self) -> None:
        """The thread has ended."""
        self._admission.refuse_waiting()
        if not self._is_closing and self._on_failure is not None:
            self._on_failure()

    def _call_soon(self, function: Callable[..., None], *arguments: object) -> None:
        """Calls a function on the event loop, from the thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


class _ToLoop:
    """Carries the thread's news to the event loop, where futures and the accounts of the arena live."""

    def __init__(self, engine: Engine[Any, Any]) -> None:
        self._engine = engine

    def settled(self, results: SequenceOf[tuple[Job[Any], object]]) -> None:
        """See `Listener`."""
        self._engine._call_soon(_resolve, results)

    def freed(self, sequence: Sequence, kept: Extent | None) -> None:
        """See `Listener`."""
        self._engine._call_soon(self._engine._admission.close, sequence, kept)

    def reused(self, extent: Extent) -> None:
        """See `Listener`."""
        self._engine._call_soon(self._engine._admission.touch, extent)

    def ended(self) -> None:
        """See `Listener`."""
        self._engine._call_soon(self._engine._ended)


def _max_length(model: LoadedModel, settings: EngineSettings) -> int:
    if settings.max_length is None:
        return model.info.max_length
    if settings.max_length > model.info.max_length:
        raise ConfigurationError(
            f"max_length is {settings.max_length}, but the model {model.info.name} was made for at most "
            f"{model.info.max_length} tokens."
        )
    return settings.max_length


def _resolve(results: SequenceOf[tuple[Job[Any], object]]) -> None:
    for job, result in results:
        if job.future is None or job.future.done():
            continue  # cancelled meanwhile
        if isinstance(result, BaseException):
            job.future.set_exception(result)
        else:
            job.future.set_result(result)
