"""One model, one thread that runs it, many sequences: what the services call."""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Generic, cast

from tandem.engine.core.background import BackgroundJob
from tandem.engine.core.jobs import Head, Job, News, PayloadT, ResultT, StepRecord, finite_head
from tandem.engine.core.watchdog import StepWatchdog
from tandem.engine.core.worker import Worker
from tandem.engine.interface import KvUsage
from tandem.engine.kv_cache.sequence import Admission, Sequence
from tandem.engine.settings import EngineSettings
from tandem.engine.steps import SMALL_STEP_TOKENS, ModelRunner
from tandem.errors import InvalidRequestError, ServiceUnavailableError
from tandem.types import Delta, ModelInfo, StepProfile

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_SECONDS = 30.0
"""For the step in progress; steps of healthy engines take less (`tandem.engine.core.watchdog`)."""
_WARM_UP_SECONDS = 5.0
"""All sizes of a model of 200 million parameters on two cores; a larger one gets its small steps, whatever the time."""
_PROFILED_SEQUENCES = (1, 2, 4, 8, 16, 32)
_PROFILED_TOKENS = (1, 3, 5, 9)
"""The target alone, and proposals of 2, 4 and 8 tokens."""


class StepTimes:
    """Durations of steps with rows for all tokens: measured once the engine is warm, then by the steps it makes."""

    def __init__(self) -> None:
        self.profile = StepProfile()
        """The durations as last published."""
        self._seconds: dict[tuple[int, int], float] = {}

    def measured(self, seconds: dict[tuple[int, int], float]) -> None:
        """Publish these, by number of sequences and tokens of each."""
        self._seconds = dict(seconds)
        self.profile = StepProfile(seconds, int(time.time()))

    def add(self, record: StepRecord) -> None:
        """Count a step. Once a size takes another time than published by a quarter, all are published anew."""
        size = record.sequence_count, record.token_count // max(record.sequence_count, 1)
        known = self._seconds.get(size)
        if known is None or size[0] * size[1] != record.token_count or record.row_count < record.token_count:
            return
        # A pause of the machine counts as twice the time; two dozen steps make the mean.
        now = self._seconds[size] = known + (min(record.seconds, 2.0 * known) - known) / 24.0
        if not 0.8 < now / self.profile.seconds[size] < 1.25:
            self.measured(self._seconds)


class Engine(Generic[PayloadT, ResultT]):
    """Runs jobs in batches on a thread of its own, so that the event loop never runs a forward pass.

    Belongs to the event loop that calls `start`; any number of its tasks may use it.
    """

    def __init__(
        self,
        model: ModelRunner,
        head: Head[PayloadT, ResultT],
        settings: EngineSettings,
        on_step: Callable[[StepRecord], None] | None = None,
        *,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        """Allocates the KV cache.

        Args:
            model: what to run.
            head: turns logits into results.
            settings: limits.
            on_step: called after each step, on the engine's thread; for metrics.
            on_failure: called on the event loop when the thread has ended by itself: no job runs any more.

        Raises:
            ConfigurationError: the settings cannot be met.
        """
        self.model = model
        self.max_length = settings.longest_sequence(model.info.name, model.info.max_length)
        """Longest sequence, in tokens."""
        machinery = model.allocate(settings, self.max_length)
        shape = machinery.shape
        # Two pages are enough for each sequence of a warm-up, in each group of layers.
        self._most_together = min(
            settings.max_sequences - settings.kept_sequences,
            max(shape.page_count // (2 * shape.group_count), 1),
        )
        self._admission = Admission(settings, model.info.vocabulary_size, shape)
        self._cache = machinery.cache
        self._runner = machinery.runner
        self._max_rows = machinery.max_rows or self.max_length
        self._watchdog = StepWatchdog(settings.step_timeout_seconds)
        self._worker = Worker(
            self._runner, self._cache, head, settings, self._tell, model.device, self._stepped, self._watchdog,
            machinery.branches,
        )  # fmt: skip
        self._on_step = on_step
        self._step_times = StepTimes()
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
        await asyncio.to_thread(self.model.close)

    async def warm_up(self) -> None:
        """Runs steps of several sizes, so that no request pays for what is set up when a size is first wanted, and
        measures some; of a large model only the small ones, which are all that the time allows for.

        Raises:
            NonFiniteLogitsError: the model computes NaN or infinity.
        """
        steps = self._served(self._runner.warm_up_steps)
        profiled = self._served(
            (width,) * count for count, width in product(_PROFILED_SEQUENCES, _PROFILED_TOKENS)
        )
        sequences = [
            await self.open(max(max(step) for step in (*steps, *profiled)))
            for _ in range(max(len(step) for step in (*steps, *profiled)))
        ]
        try:
            for sequence in sequences:
                sequence.is_private = True
                # A new one would wait its turn for more.
                await self.submit(Job(sequence, Delta(0, (0,)), 0, None))  # type: ignore[arg-type]
            warm_tokens = await self._run_warm_up(steps, sequences)
            with self._worker.using_head(partial(finite_head, self.model)):
                await self._check_logits(sequences[0])
                warm = [step for step in profiled if sum(step) <= warm_tokens]
                self._step_times.measured(await self._profile(warm, sequences))
        finally:
            for sequence in sequences:
                self.release(sequence)

    def _served(self, steps: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Those of the steps, each given by the tokens of its sequences, for which this engine has room at once."""
        return [step for step in steps if len(step) <= self._most_together and max(step) <= self.max_length]

    async def _run_warm_up(
        self, steps: SequenceOf[tuple[int, ...]], sequences: SequenceOf[Sequence]
    ) -> float:
        """Returns the largest number of tokens for which a step is prepared; infinity if all are."""
        ends = time.perf_counter() + _WARM_UP_SECONDS
        for step in steps:
            began, size = time.perf_counter(), sum(step)
            await self._step(sequences, step, size)
            ended = time.perf_counter()
            if size >= SMALL_STEP_TOKENS and ended + 2 * (ended - began) > ends:
                return size
        return math.inf

    async def _profile(
        self, steps: SequenceOf[tuple[int, ...]], sequences: SequenceOf[Sequence]
    ) -> dict[tuple[int, int], float]:
        # Enough for all sizes of the demo pair; of a larger model the smallest are measured
        ends = time.perf_counter() + 1.0
        found: dict[tuple[int, int], float] = {}
        for step in sorted(steps, key=sum):
            seconds = []
            for repeat in range(3):  # for a median
                jobs = await self._step(sequences, step, sum(step) + repeat, with_rows=True)
                seconds += [job.cost.seconds for job in jobs[:1] if job.cost is not None]
            found[len(step), step[0]] = statistics.median(seconds)
            if time.perf_counter() > ends:
                break
        return found

    def _stepped(self, record: StepRecord) -> None:
        began = time.perf_counter()
        if self._on_step is not None:
            self._on_step(record)
        # The observer takes part in how long a step takes.
        self._step_times.add(replace(record, seconds=record.seconds + time.perf_counter() - began))

    async def _step(
        self, sequences: SequenceOf[Sequence], step: tuple[int, ...], number: int, *, with_rows: bool = False
    ) -> list[Job[Any]]:
        """Runs a step of so many tokens of each sequence. Another number than the last one's makes other tokens, or
        they would be known already."""
        token_id = number % self.model.info.vocabulary_size
        jobs: list[Job[Any]] = [
            Job(sequence, Delta(0, (token_id,) * count), min(count, self._max_rows) if with_rows else 0, None)
            for sequence, count in zip(sequences, step, strict=False)
        ]
        for job in jobs:
            job.future = asyncio.get_running_loop().create_future()
        self._worker.submit(*jobs)  # together, so that they share a step
        await asyncio.gather(*(job.future for job in jobs if job.future is not None))
        return jobs

    async def _check_logits(self, sequence: Sequence) -> None:
        """Refuses a model that computes what are no numbers, by several tokens with rows for all of them."""
        count = min(4, sequence.max_length)  # enough for attention to more than the token itself
        token_ids = tuple(index % self.model.info.vocabulary_size for index in range(count))
        await self.submit(Job(sequence, Delta(0, token_ids), min(count, self._max_rows), None))  # type: ignore[arg-type]

    async def open(self, max_length: int, spare_tokens: int = 0, client: str = "") -> Sequence:
        """A new, empty sequence of up to `max_length` tokens; waits while `max_sequences` are open. A free place goes
        to the client that has the fewest, and then in order of arrival.

        It takes pages as it grows, and `spare_tokens` more behind its end while there are any: for branches
        (`put_back`).

        Every sequence must be given back with `release`, whatever happens.

        Raises:
            InvalidRequestError: `max_length` is more than the engine serves, or less than 1.
            CapacityError: too many are open and too many wait already.
            ServiceUnavailableError: the engine is closing.
        """
        self._check_running()
        if not 1 <= max_length <= self.max_length:
            raise InvalidRequestError(
                f"A sequence of up to {max_length} tokens was asked for; this model serves 1 to {self.max_length}."
            )
        return await self._admission.open(max_length, spare_tokens, client)

    def release(self, sequence: Sequence) -> None:
        """Gives the sequence's pages back, before the next step. Jobs of it that are in flight are dropped."""
        if not sequence.is_released:
            sequence.is_released = True
            self._worker.release(sequence)

    async def submit(self, job: Job[PayloadT]) -> ResultT:
        """Runs a job and returns what the head makes of it. Cancelling the caller drops the job before the next step.

        Jobs of one sequence run one after the other; a job object is run once.

        Raises:
            InvalidRequestError: the delta does not fit the sequence, or the sequence was released.
            ServiceUnavailableError: the engine is closing.
            TandemError: the step failed.
        """
        self._check_running()
        if job.sequence.is_released:
            raise InvalidRequestError("The sequence was released.")
        job.future = asyncio.get_running_loop().create_future()
        self._worker.submit(job)
        try:
            return cast(ResultT, await job.future)
        except asyncio.CancelledError:
            job.is_cancelled = True
            raise

    def grant(self, sequence: Sequence, asked: int, lead: int) -> None:
        """Lets a sequence go on by itself. See `tandem.engine.interface.SequenceEngine`."""
        self._worker.grant(sequence, asked, lead)

    def put_back(self, job: BackgroundJob) -> None:
        """Runs branches of a sequence while there is no job to run, a step at a time, until a job of it comes.

        Raises:
            ServiceUnavailableError: the engine is closing.
        """
        self._check_running()
        self._worker.put_back(job)

    @property
    def info(self) -> ModelInfo:
        """The model, with the longest sequence that is served and what steps take."""
        return replace(self.model.info, max_length=self.max_length, step_profile=self._step_times.profile)

    @property
    def is_running(self) -> bool:
        """True if requests are taken: between `start` and `close`, unless the thread has failed."""
        return self._loop is not None and not self._worker.is_stopping

    @property
    def overdue_seconds(self) -> float:
        """How long the step in progress has taken, once that is longer than any step should; 0 otherwise."""
        return self._watchdog.overdue_seconds

    @property
    def usage(self) -> KvUsage:
        """Usage of the KV cache, and the number of sequences that wait for it."""
        usage = self._cache.usage(self._admission.waiting_count, self._admission.open_count)
        leads = self._worker.leads
        return replace(usage, led_step_count=leads.begun_count, wasted_step_count=leads.wasted_count)

    def _check_running(self) -> None:
        if not self.is_running:
            raise ServiceUnavailableError("The engine is not running.")

    def _ended(self) -> None:
        self._admission.refuse_waiting()
        if not self._is_closing and self._on_failure is not None:
            self._on_failure()

    def _tell(self, news: News) -> None:
        """Takes news from the thread to the event loop, where futures and the count of open sequences live."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._learn, news)

    def _learn(self, news: News) -> None:
        self._resolve(news.results)
        for sequence in news.freed:
            self._admission.close(sequence)
        if news.has_ended:
            self._ended()

    def _resolve(self, results: SequenceOf[tuple[Job[Any], object]]) -> None:
        for job, result in results:
            if job.on_result is not None and self._loop is not None:
                # Later, like the tasks that futures wake: the answers of a sequence keep their order.
                self._loop.call_soon(job.on_result, job, result)
            elif job.future is None or job.future.done():
                continue  # cancelled meanwhile
            elif isinstance(result, BaseException):
                job.future.set_exception(result)
            else:
                job.future.set_result(result)
