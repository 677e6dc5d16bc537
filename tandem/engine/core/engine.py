"""One model, one thread that runs it, many sequences: what the services call, and how the thread takes its steps."""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import accumulate, product
from typing import Any, Generic, cast

import torch

from tandem.engine.core.background import BackgroundJob, BackgroundWork
from tandem.engine.core.jobs import (
    Done,
    Drafter,
    Extended,
    Failed,
    FeatureReader,
    Head,
    HeadOutcome,
    Job,
    Leads,
    PayloadT,
    ResultT,
    StepRecord,
    StepTokens,
    finite_head,
    non_finite,
)
from tandem.engine.core.scheduler import RETRY_SECONDS, PageScheduler, RejoinWindow, next_segments
from tandem.engine.core.timing import StepTimes, StepWatchdog
from tandem.engine.interface import EngineSettings, KvUsage, RowRequest, decide_own
from tandem.engine.kv_cache.sequence import Segment, Sequence
from tandem.engine.steps import SMALL_STEP_TOKENS, ModelRunner
from tandem.errors import CapacityError, InvalidRequestError, ServiceUnavailableError, TandemError
from tandem.model.types import Acceptance, CacheCounts, Delta, HiddenStates, ModelInfo, Proposal, Verification
from tandem.serving.fair_places import FairPlaces

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_SECONDS = 30.0
"""For the step in progress; steps of healthy engines take less (`tandem.engine.core.timing`)."""
WARM_UP_SECONDS = 5.0
"""All sizes of a model of 200 million parameters on two cores; a larger one gets its small steps, whatever the time."""
_PROFILED_SEQUENCES = (1, 2, 4, 8, 16, 32)
_PROFILED_TOKENS = (1, 3, 5, 9)
"""The target alone, and proposals of 2, 4 and 8 tokens."""


class Engine(Generic[PayloadT, ResultT]):
    """Runs jobs in batches on a thread of its own, so that the event loop never runs a forward pass.

    Belongs to the event loop that calls `start`.
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
        self.model = model
        self.max_length = settings.longest_sequence(model.info.name, model.info.max_length)
        # Both are the thread's own.
        cache, runner = self._cache, self._runner = model.allocate(settings, self.max_length)
        shape = self._shape = cache.shape
        free_places = settings.max_sequences - settings.kept_sequences
        # Two pages are enough for each sequence of a warm-up, in each group of layers.
        self._most_together = min(free_places, max(shape.page_count // (2 * shape.group_count), 1))
        self._places = FairPlaces(free_places, settings.kept_sequences)
        self._max_waiting = settings.max_waiting
        self._on_step = on_step
        self._on_failure = on_failure
        self._is_closing = False
        self._loop: asyncio.AbstractEventLoop | None = None

        self._thread = threading.Thread(target=self._work, name="tandem-engine", daemon=True)
        self._wakeup = threading.Condition()
        # Guarded by the condition: what other threads want.
        self._submitted: list[Job[PayloadT]] = []
        self._asked: list[Callable[[], None]] = []
        """Grants, background work and releases, in their order."""
        self._is_stopping = True
        """No jobs are taken: before `start`, after `close`, and once the thread has failed."""
        self._rejoin = RejoinWindow(self._wakeup)
        # The thread's own.
        self._head: Head[Any, Any] = head
        self._chunk_tokens = settings.prefill_chunk_tokens
        self._queued: list[Job[PayloadT]] = []
        self._running: dict[Sequence, Job[PayloadT]] = {}
        """At most one job for each sequence, in the order in which they started."""
        self._ended: list[tuple[Job[PayloadT], object]] = []
        """Jobs that have ended since the last delivery, each with its result or exception."""
        self._freed: list[Sequence] = []
        self._watchdog = StepWatchdog(settings.step_timeout_seconds)
        self._step_times = StepTimes()
        self._background = BackgroundWork(cache, runner, self._stepped, self._watchdog)
        self._leads = Leads()
        self._pages = PageScheduler(cache, self._background.drop, self._leads.is_ahead)
        self._failed_steps = 0
        self._reuses_prefixes = settings.prefix_reuse
        self._step_tokens = StepTokens()
        self._prefix_query_tokens = 0
        self._prefix_hit_tokens = 0
        self._waits_for_pages = False
        """Every job does, and only news can change that."""

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_stopping = False
        self._thread.start()

    async def close(self) -> None:
        if self._loop is None:
            return
        self._is_closing = True
        with self._wakeup:
            self._is_stopping = True
            self._wakeup.notify()
        self._places.refuse_waiting(_shutting_down())
        await asyncio.to_thread(self._thread.join, _CLOSE_TIMEOUT_SECONDS)
        if self._thread.is_alive():
            logger.error("engine thread did not stop", extra={"timeout_seconds": _CLOSE_TIMEOUT_SECONDS})
        await asyncio.to_thread(self.model.close)

    async def warm_up(self) -> None:
        """See `RunningModel`. Of a large model only small steps are run, which are all that the time allows for."""
        steps = self._served(self._runner.warm_up_steps)
        profiled = self._served(
            (width,) * count for count, width in product(_PROFILED_SEQUENCES, _PROFILED_TOKENS)
        )
        every = [*steps, *profiled]
        sequences = [await self.open(max(map(max, every))) for _ in range(max(map(len, every)))]
        own = self._head
        try:
            # New ones would wait their turn for more. The first one's step shows how long a token may take; the others
            # share one, which takes little longer.
            for group in filter(None, (sequences[:1], sequences[1:])):
                await self._warm_step(group, (1,) * len(group), 0)
            warm_tokens = await self._run_warm_up(steps, sequences)
            self._runner.is_warm = True
            self._head = partial(finite_head, self.model)  # no job is in flight
            # By enough tokens for attention to more than the token itself
            await self._warm_step(sequences[:1], (min(4, sequences[0].max_length),), 1, with_rows=True)
            warm = [step for step in profiled if sum(step) <= warm_tokens]
            self._step_times.measured(await self._profile(warm, sequences))
        finally:
            self._head = own
            self._step_tokens = StepTokens()
            for sequence in sequences:
                self.release(sequence)

    def _served(self, steps: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [step for step in steps if len(step) <= self._most_together and max(step) <= self.max_length]

    async def _run_warm_up(
        self, steps: SequenceOf[tuple[int, ...]], sequences: SequenceOf[Sequence]
    ) -> float:
        """Returns the largest number of tokens of a prepared step; infinity if all are prepared."""
        ends = time.perf_counter() + WARM_UP_SECONDS
        for step in steps:
            began = time.perf_counter()
            size = sum(step)
            await self._warm_step(sequences, step, size)
            ended = time.perf_counter()
            if size >= SMALL_STEP_TOKENS and ended + 2 * (ended - began) > ends:
                return size
        return math.inf

    async def _profile(
        self, steps: SequenceOf[tuple[int, ...]], sequences: SequenceOf[Sequence]
    ) -> dict[tuple[int, int], float]:
        # Enough for all sizes of the demo pair; of a larger model the smallest are measured
        ends = time.perf_counter() + WARM_UP_SECONDS / 5
        found: dict[tuple[int, int], float] = {}
        for step in sorted(steps, key=sum):
            seconds = [
                await self._warm_step(sequences, step, sum(step) + i, with_rows=True) for i in range(3)
            ]
            found[len(step), step[0]] = statistics.median(seconds)
            if time.perf_counter() > ends:
                break
        return found

    async def _warm_step(
        self, sequences: SequenceOf[Sequence], step: tuple[int, ...], number: int, *, with_rows: bool = False
    ) -> float:
        """Runs a step of so many tokens of each sequence and returns its seconds. Another number than the last one's
        makes other tokens, or they would be known already."""
        token_id = number % self.model.info.vocabulary_size
        loop = asyncio.get_running_loop()
        jobs: list[Job[Any]] = [
            Job(sequence, Delta(0, (token_id,) * count), count if with_rows else 0, None)
            for sequence, count in zip(sequences, step, strict=False)
        ]
        for job in jobs:
            job.future = loop.create_future()
        self._put(*jobs)  # together, so that they share a step
        await asyncio.gather(*(job.future for job in jobs if job.future is not None))
        return jobs[0].cost.seconds if jobs[0].cost is not None else 0.0

    async def open(
        self, max_length: int, spare_tokens: int = 0, client: str = "", scope: str = ""
    ) -> Sequence:
        """See `SequenceEngine`. The sequence takes pages as it grows, and `spare_tokens` more behind its end while
        there are any: for branches (`put_back`)."""
        if self._is_stopping:
            raise _not_running()
        if not 1 <= max_length <= self.max_length:
            raise InvalidRequestError(
                f"A sequence of up to {max_length} tokens was asked for; this model serves 1 to {self.max_length}."
            )
        places = self._places
        shape = self._shape
        if not places.has_room(client) and places.waiting >= self._max_waiting:
            raise CapacityError(
                f"{places.held} sequences are open and {places.waiting} requests are waiting, which is the most; try "
                "later."
            )
        await places.take(client)
        most_tokens = min(max_length + spare_tokens, max(shape.page_count * shape.page_tokens, max_length))
        vocabulary_size = self.model.info.vocabulary_size
        tables = shape.tables(most_tokens)
        return Sequence(tables, max_length, vocabulary_size, spare_tokens, client, scope)

    def release(self, sequence: Sequence) -> None:
        if sequence.is_released:
            return
        sequence.is_released = True
        with self._wakeup:
            self._asked.append(partial(self._free, sequence))
            self._rejoin.came_back(sequence)

    async def submit(self, job: Job[PayloadT]) -> ResultT:
        """Runs a job, behind those of its sequence, and returns what the head makes of it. Cancelling the caller drops
        it before the next step."""
        if job.sequence.is_released:
            raise _released_error()
        job.future = asyncio.get_running_loop().create_future()
        self._put(job)
        try:
            return cast(ResultT, await job.future)
        except asyncio.CancelledError:
            job.is_cancelled = True
            raise

    def _put(self, *jobs: Job[PayloadT]) -> None:
        with self._wakeup:
            if self._is_stopping:
                raise _not_running()
            self._submitted.extend(jobs)
            for job in jobs:
                self._rejoin.came_back(job.sequence)

    def grant(self, sequence: Sequence, asked: int, lead: int) -> None:
        with self._wakeup:
            self._asked.append(partial(self._grant, sequence, asked, lead))
            self._rejoin.came_back(sequence)

    def waits_for_pages(self, sequence: Sequence) -> bool:
        """See `SequenceEngine`. The event loop only looks at what the thread notes."""
        return sequence in self._pages.waiting

    @property
    def keeps_branches(self) -> bool:
        """True if a branch that comes true need not be computed again."""
        return self._runner.writes_behind_trunk

    def put_back(self, job: BackgroundJob) -> None:
        """Runs branches of a sequence while there is no job to run, a step at a time, until a job of it comes."""
        with self._wakeup:
            if self._is_stopping:
                raise _not_running()
            self._asked.append(partial(self._background.add, job))
            self._wakeup.notify()

    @property
    def info(self) -> ModelInfo:
        return replace(self.model.info, max_length=self.max_length, step_profile=self._step_times.profile)

    @property
    def overdue_seconds(self) -> float:
        return self._watchdog.overdue_seconds

    @property
    def is_full(self) -> bool:
        return not self._places.has_room("")

    @property
    def usage(self) -> KvUsage:
        return replace(
            self._cache.usage(),
            sequence_count=self._places.held,
            waiting_count=self._places.waiting,
            led_step_count=self._leads.begun_count,
            wasted_step_count=self._leads.wasted_count,
            prefix_query_tokens=self._prefix_query_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            page_tokens=self._shape.page_tokens,
            reuses_prefixes=self._reuses_prefixes,
            step_tokens=self._step_tokens.histogram,
        )

    def _tell(self, learn: Callable[..., None], *news: object) -> None:
        """Takes news from the thread to the event loop, where futures and the count of open sequences live."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(learn, *news)

    def _learn(self, ended: SequenceOf[tuple[Job[Any], object]], freed: SequenceOf[Sequence]) -> None:
        for job, result in ended:
            if job.on_led is not None and self._loop is not None:
                # Later, like the tasks that futures wake: the answers of a sequence keep their order.
                self._loop.call_soon(job.on_led, job.payload, result)
            elif job.future is None or job.future.done():
                continue  # cancelled meanwhile
            elif isinstance(result, BaseException):
                job.future.set_exception(result)
            else:
                job.future.set_result(result)
        for sequence in freed:
            self._places.leave(sequence.client)

    def _learn_of_end(self) -> None:
        self._places.refuse_waiting(_shutting_down())
        if not self._is_closing and self._on_failure is not None:
            self._on_failure()

    # ---- on the thread: taking work

    def _work(self) -> None:
        error = _shutting_down()
        try:
            device = self.model.device
            if device.type == "cuda" and device.index is not None:
                torch.cuda.set_device(device)  # a thread begins with the first GPU, which "cuda" means
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
                    self._deliver_if_idle()
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
        self._tell(self._learn_of_end)

    def _take_work(self) -> bool:
        """Waits until there is something to run; false when the thread is to end."""
        while True:
            with self._wakeup:
                while not (self._has_work or self._submitted or self._asked or self._is_stopping):
                    woken = self._wakeup.wait(RETRY_SECONDS if self._waits_for_pages else None)
                    if not woken:
                        break  # other sequences have been idle for longer
                self._waits_for_pages = False
                if self._queued or self._submitted or self._running:
                    self._rejoin.wait(has_running=bool(self._running), is_stopping=lambda: self._is_stopping)
                self._queued.extend(self._submitted)
                self._submitted.clear()
                asked = self._asked
                self._asked = []
                if self._is_stopping:
                    return False
            # Before the jobs: a job that came later ends the background work of its sequence.
            for act in asked:
                act()
            for job in [job for job in self._running.values() if job.is_abandoned]:
                self._settle(job, _released_error())
            self._start_queued()
            self._deliver_if_idle()
            if self._running or not self._background.is_empty:
                return True

    @property
    def _has_work(self) -> bool:
        """True if there is a job to run, or one that waited for another of its sequence, or background work."""
        if self._waits_for_pages:
            return False
        return bool(self._running or self._queued) or not self._background.is_empty

    def _grant(self, sequence: Sequence, asked: int, count: int) -> None:
        self._start_job(self._leads.grant(sequence, asked, 0 if sequence.is_released else count))

    def _free(self, sequence: Sequence) -> None:
        self._leads.end(sequence)
        self._background.drop(sequence)
        self._pages.waiting.discard(sequence)
        self._cache.release(sequence)
        self._freed.append(sequence)

    def _start_queued(self) -> None:
        waiting: list[Job[PayloadT]] = []
        for job in self._queued:  # which stay there if something fails, so that no caller hangs
            if job.is_abandoned:
                self._settle(job, _released_error())
                continue
            if self._leads.end(job.sequence):
                self._running.pop(job.sequence, None)
            if job.sequence in self._running:
                waiting.append(job)
            else:
                self._start_job(job)
        self._queued = waiting

    def _start_job(self, job: Job[PayloadT] | None) -> None:
        if job is None:
            return  # no lead lets another follow
        sequence = job.sequence
        self._background.drop(sequence)
        try:
            sequence.apply(job.delta)
            self._cache.check_rows(sequence, job.row_count)
            sequence.want_rows(job.row_count)
        except InvalidRequestError as error:
            self._settle(job, error)
            return
        if sequence.pending_count or job.withheld is not None:
            self._running[sequence] = job
            sequence.idle_since = math.inf
        else:
            self._settle(job, None)

    def _settle(self, job: Job[PayloadT], result: object) -> None:
        if self._running.get(job.sequence) is job:
            del self._running[job.sequence]
            self._pages.waiting.discard(job.sequence)
            job.sequence.idle_since = time.monotonic()
            if job.sequence.is_new:
                job.sequence.is_new = False
                self._count_prefix(job.sequence)
        if isinstance(result, BaseException):
            self._leads.end(job.sequence)
        self._ended.append((job, result))

    def _count_prefix(self, sequence: Sequence) -> None:
        """Counts what a sequence has found computed, after its first job."""
        if self._reuses_prefixes and not sequence.is_private:
            self._prefix_query_tokens += sequence.length
            self._prefix_hit_tokens += sequence.reused_length

    def _deliver_if_idle(self) -> None:
        """Delivers unless a step begins now, which does it when it computes: the event loop would take the interpreter
        from it."""
        if not self._running or self._waits_for_pages:
            self._deliver()

    def _deliver(self) -> None:
        """Delivers all results of a step at once: waking the event loop costs more than a result."""
        if self._ended or self._freed:
            self._tell(self._learn, self._ended, self._freed)
            self._ended = []
            self._freed = []

    # ---- on the thread: a step

    def _step(self) -> bool:
        """Schedules and runs a step; false if every job waits for pages.

        What fails here fails for the callers of this step alone.
        """
        self._extend()
        began = time.perf_counter()
        self._pages.reuse_prefixes(self._running.values())
        prompt_tokens = self._runner.prompt_tokens(self._chunk_tokens)
        segments = self._pages.with_pages(next_segments(self._running.values(), prompt_tokens))
        if not segments:
            # The budget may have gone to prompts without pages, while those who hold the pages wait for the budget.
            waited = [job for job in self._running.values() if not self._pages.is_ahead(job.sequence)]
            oldest = sorted(waited, key=lambda job: job.sequence.serial)[:1]
            segments = self._pages.with_pages(next_segments(oldest, prompt_tokens))
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
        further = [len(each.token_ids) for _, each in outcomes if isinstance(each, Extended)]
        token_count += sum(further)
        row_count += sum(further)
        pass_count = 1 + max(further, default=0)
        record = self._stepped(
            StepRecord(len(jobs), token_count, row_count, model_end - began, seconds, pass_count)
        )
        for job in jobs:
            job.count_step(record.seconds, len(jobs), token_count)
        for job, outcome in outcomes:
            self._conclude(job, outcome)
        return True

    def _stepped(self, record: StepRecord) -> StepRecord:
        """Tells of a step. What its observer takes is counted in: whoever waits for the step waits for that too."""
        told = time.perf_counter()
        self._step_tokens.add(record.token_count)
        if self._on_step is not None:
            self._on_step(record)
        record = replace(record, seconds=record.seconds + time.perf_counter() - told)
        self._step_times.add(record)
        return record

    def _run(
        self, segments: SequenceOf[Segment], jobs: SequenceOf[Job[PayloadT]]
    ) -> tuple[list[tuple[Job[PayloadT], HeadOutcome[ResultT]]], int, float]:
        """Runs the model and asks the head; returns outcomes, the number of rows and when the forward pass ended."""
        rows: list[int] = []
        """Indices of the step's tokens whose logits are wanted, which complete the jobs that are ready."""
        ready: list[Job[PayloadT]] = []
        ends = accumulate(segment.token_count for segment in segments)
        for segment, job, token_end in zip(segments, jobs, ends, strict=True):
            if job.row_count and segment.end == segment.sequence.length:
                rows.extend(range(token_end - job.row_count, token_end))
                ready.append(job)
        self._prepare(ready)
        if not self._runner.returns_early:
            self._deliver()
        logits = self._runner.run(segments, rows)
        model_end = time.perf_counter()
        for job, segment in zip(jobs, segments, strict=True):
            job.sequence.advance(segment.token_count)
            self._cache.after_step(job.sequence)
            if job.row_count == 0 and job.sequence.pending_count == 0 and job.withheld is None:
                self._settle(job, None)  # it wanted keys and values only
        self._step_launched(ready)
        outcomes = self._head(ready, logits) if ready else []
        return list(zip(ready, outcomes, strict=True)), len(rows), model_end

    def _extend(self) -> None:
        """Adds what is proposed behind tokens that jobs withhold, at the beginning of a step."""

    def _prepare(self, ready: SequenceOf[Job[PayloadT]]) -> None:
        """Begins, on another thread, what the head needs for jobs that the forward pass to come completes."""

    def _step_launched(self, ready: SequenceOf[Job[PayloadT]]) -> None:
        """Delivers beside the step that a device runs now, before the head waits for it."""
        self._deliver_beside_device()

    def _deliver_beside_device(self) -> None:
        """Delivers the results of the step before if a device runs one now. Not earlier: the event loop would take the
        interpreter from what launches it, while the device has nothing to do."""
        if self._runner.returns_early:
            self._deliver()

    def _conclude(self, job: Job[PayloadT], outcome: HeadOutcome[ResultT]) -> None:
        if isinstance(outcome, Extended):
            for token_id in outcome.token_ids:
                job.sequence.append(token_id)
            job.sequence.advance(len(outcome.token_ids))
            outcome = outcome.outcome
        if isinstance(outcome, Done):
            result, following = outcome.go_on() if outcome.go_on is not None else (outcome.result, None)
            self._settle(job, result)
            if following is not None:
                self._start_job(self._leads.follow(job, following))
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
        if not isinstance(error, TandemError):
            error = TandemError("The model's step failed; the service's log says why.")
        for job in jobs:
            if self._running.get(job.sequence) is job:
                self._settle(job, error)


def _shutting_down() -> ServiceUnavailableError:
    return ServiceUnavailableError("The engine is shutting down.")


def _not_running() -> ServiceUnavailableError:
    return ServiceUnavailableError("The engine is not running.")


def _released_error() -> InvalidRequestError:
    return InvalidRequestError("The sequence was released.")


# ---- targets


class RowEngine(Engine[RowRequest, Verification]):
    """Applies steps and answers with rows, computed together with whatever else waits."""

    def __init__(
        self,
        model: ModelRunner,
        settings: EngineSettings,
        on_step: Callable[[StepRecord], None] | None = None,
        *,
        on_failure: Callable[[], None] | None = None,
        drafter: Drafter | None = None,
        features: FeatureReader | None = None,
    ) -> None:
        """
        Args:
            drafter: Makes the proposals of steps that ask for those of the target's own head.
            features: Reads what a head on another device wants of each step.
        """
        head = partial(row_head, model=model, on_launched=self._deliver_beside_device, features=features)
        super().__init__(model, head, settings, on_step, on_failure=on_failure)
        self._drafter = drafter
        self._features = features
        self._masks = ThreadPoolExecutor(1, "masks")

    async def close(self) -> None:
        await super().close()
        self._masks.shutdown(wait=False)

    @property
    def overdue_seconds(self) -> float:
        drafting = 0.0 if self._drafter is None else self._drafter.overdue_seconds
        return max(super().overdue_seconds, drafting)

    async def run(self, sequence: Sequence, request: RowRequest) -> Verification:
        job = make_job(sequence, request, is_led=False)
        answer = await self.submit(job)
        if job.row_count:
            return answer
        # All tokens are computed now, and the next answer does not say it again
        counts = CacheCounts(sequence.reused_length, sequence.preemption_count)
        return Verification(request.base_length, (), cache=counts)

    def _start_job(self, job: Job[RowRequest] | None) -> None:
        if job is not None and self._drafter is not None:
            self._drafter.begin(job)
        super()._start_job(job)

    def _free(self, sequence: Sequence) -> None:
        super()._free(sequence)
        if self._drafter is not None:
            self._drafter.release(sequence)
        if self._features is not None:
            self._features.release(sequence)

    def _extend(self) -> None:
        ready = [
            job
            for job in self._running.values()
            if job.withheld is not None and not job.sequence.pending_count
        ]
        if self._drafter is None:
            return
        if ready or not self._runner.returns_early:
            # The answers leave first: nobody waits for what is drafted behind them.
            self._deliver()
        if ready:
            for job, proposal in zip(ready, self._drafter.propose(ready), strict=True):
                self._add_proposal(job, proposal)
        self._drafter.begin_step()

    def _add_proposal(self, job: Job[RowRequest], proposal: Proposal) -> None:
        assert job.withheld is not None
        sequence = job.sequence
        try:
            sequence.apply(Delta(sequence.length, (job.withheld, *proposal.token_ids)))
            self._cache.check_rows(sequence, len(proposal) + 1)
        except InvalidRequestError as error:
            self._settle(job, error)
            return
        job.withheld = None
        job.row_count = len(proposal) + 1
        job.payload = job.payload.with_proposal(proposal)
        sequence.want_rows(job.row_count)

    def _step_launched(self, ready: SequenceOf[Job[RowRequest]]) -> None:
        if not ready:
            super()._step_launched(ready)  # otherwise when the rows are launched as well

    def _prepare(self, ready: SequenceOf[Job[RowRequest]]) -> None:
        """Compute masks while the model computes logits: they depend on the tokens alone."""
        # A warm-up has no payload
        own = [job for job in ready if getattr(job.payload, "grammar", None) is not None]
        if own:
            begun = self._masks.submit(_constrained, own)
            for job in own:
                job.prepared = begun


def make_job(sequence: Sequence, request: RowRequest, *, is_led: bool) -> Job[RowRequest]:
    """The job of a request. Where the target's own head is to propose, it withholds its last token until then."""
    step = request.step
    delta = step.delta
    on_led = request.on_led if is_led else None
    lead = 0 if is_led else step.lead
    if step.own_tokens is None:
        return Job(sequence, delta, step.row_count, request, lead, on_led)
    if not step.own_tokens or delta.length <= request.options.prompt_length:
        request = request.with_proposal(Proposal(delta.length))
        return Job(sequence, delta, request.step.row_count, request, lead, on_led)
    before = Delta(delta.base_length, delta.token_ids[:-1])
    return Job(sequence, before, 0, request, lead, on_led, withheld=delta.token_ids[-1])


def _constrained(
    jobs: SequenceOf[Job[RowRequest]],
) -> dict[Job[RowRequest], RowRequest | InvalidRequestError]:
    found: dict[Job[RowRequest], RowRequest | InvalidRequestError] = {}
    for job in jobs:
        try:
            found[job] = job.payload.with_tokens(job.sequence.token_ids)
        except InvalidRequestError as error:
            found[job] = error
    return found


def row_head(
    ready: SequenceOf[Job[RowRequest]],
    logits: Any,
    model: ModelRunner,
    on_launched: Callable[[], None] = lambda: None,
    features: FeatureReader | None = None,
) -> list[Done[Verification] | Failed]:
    """Logits become the rows that each job asks for. `on_launched` is called before the host waits for them."""
    given = [_with_tokens(job) for job in ready]
    requests = [
        each if isinstance(each, RowRequest) else replace(job.payload, grammar=None)
        for each, job in zip(given, ready, strict=True)
    ]
    launched = model.launch_rows(requests, logits)
    on_launched()
    answers = launched.read()
    decided = decide_own([job.payload for job in ready], answers)
    states = [None] * len(ready) if features is None else features.read(ready, answers)
    outcomes: list[Done[Verification] | Failed] = []
    for job, each, answer, acceptance, own in zip(ready, given, answers, decided, states, strict=True):
        if isinstance(each, InvalidRequestError):
            outcomes.append(Failed(each))
        elif answer is None:
            outcomes.append(non_finite(job.payload.base_length))
        else:
            outcomes.append(Done(answer, partial(_go_on, job, answer, acceptance, own)))
    return outcomes


def _go_on(
    job: Job[RowRequest],
    answer: Verification,
    acceptance: Acceptance | None,
    features: HiddenStates | None = None,
) -> tuple[Verification, Job[RowRequest] | None]:
    request = job.payload
    proposal = request.proposal
    if proposal is None and job.on_led is not None:
        proposal = Proposal(answer.base_length, tuple(job.delta.token_ids[1:]))
    sequence = job.sequence
    cache = None
    if sequence.is_new or sequence.preemption_count:
        cache = CacheCounts(sequence.reused_length, sequence.preemption_count)
    counted = Verification(
        answer.base_length,
        answer.rows,
        job.cost,
        proposal,
        cache=cache,
        logprobs=answer.logprobs,
        features=features,
    )
    told, following = request.go_on(counted, acceptance, job.sequence.token_ids)
    return told, None if following is None else make_job(job.sequence, following, is_led=True)


def _with_tokens(job: Job[RowRequest]) -> RowRequest | InvalidRequestError:
    if job.prepared is not None:
        return cast("RowRequest | InvalidRequestError", job.prepared.result()[job])
    request = job.payload
    return request.with_tokens(job.sequence.token_ids) if request.options.reads_tokens else request
