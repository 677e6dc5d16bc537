"""Work that nobody waits for yet: it is done a step at a time, while no job is there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from torch import Tensor

from tandem.engine.backends.branches import BranchRunner, BranchStep, SequenceBranches
from tandem.engine.core.events import StepRecord
from tandem.engine.core.runner import StepRunner
from tandem.engine.core.watchdog import StepWatchdog
from tandem.engine.kv_cache.paged_cache import PagedCache
from tandem.engine.kv_cache.segment import Segment
from tandem.engine.kv_cache.sequence import Sequence
from tandem.errors import InvalidRequestError, TandemError
from tandem.types import Delta

logger = logging.getLogger(__name__)

_MAX_STEP_TOKENS = 256
"""Maximum tokens of trunks and branches in a step: a longer step would delay jobs that arrive meanwhile."""


class BackgroundJob(Protocol):
    """Branches of one sequence. Every method is called on the engine's thread."""

    @property
    def sequence(self) -> Sequence:
        """The sequence."""

    @property
    def delta(self) -> Delta:
        """Makes the sequence the trunk. It is applied in any case, also when the work is never begun."""

    @property
    def row_count(self) -> int:
        """Number of the trunk's last positions whose logits decide where it branches."""

    def begin(self, logits: Tensor, room: int) -> BranchStep | None:
        """Choose the branches.

        Args:
            logits: [row_count, vocabulary_size] of the trunk's last positions.
            room: Tokens that fit behind the trunk.

        Returns:
            The first step; None for no branches.
        """

    def advance(self, logits: Tensor) -> BranchStep | None:
        """Take the logits that follow each branch, [branches, vocabulary_size], and return what to run next."""

    def count_step(self, record: StepRecord) -> None:
        """A step of branches has ended, with what `advance` made of it."""

    def fail(self, error: TandemError) -> None:
        """It ends with an error."""


@dataclass(slots=True)
class _Begun:
    """A job whose trunk is read."""

    job: BackgroundJob
    step: BranchStep
    """The one that is to come."""

    @property
    def part(self) -> SequenceBranches:
        return SequenceBranches(self.job.sequence, self.step)


class BackgroundWork:
    """The jobs in the background, at most one for each sequence. They share steps."""

    def __init__(
        self,
        runner: StepRunner,
        branches: BranchRunner | None,
        on_step: Callable[[StepRecord], None] | None,
        watchdog: StepWatchdog,
        cache: PagedCache,
    ) -> None:
        """
        Args:
            runner: Runs the trunks.
            branches: Runs the branches; None where the model cannot: deltas are applied, and that is all.
            on_step: Told of each step.
            watchdog: Times the steps.
            cache: Gives the pages, as far as nobody else holds them.
        """
        self._cache = cache
        self._runner = runner
        self._branches = branches
        self._on_step = on_step
        self._watchdog = watchdog
        self._waiting: dict[Sequence, BackgroundJob] = {}
        self._begun: dict[Sequence, _Begun] = {}

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to do."""
        return not (self._waiting or self._begun)

    def add(self, job: BackgroundJob) -> None:
        """Take a job, in place of the sequence's last one."""
        self.drop(job.sequence)
        self._waiting[job.sequence] = job

    def drop(self, sequence: Sequence) -> None:
        """Do no more for a sequence. Its tokens are then those of its last job's delta."""
        self._begun.pop(sequence, None)
        job = self._waiting.pop(sequence, None)
        if job is not None and not sequence.is_released:
            self._applied(job)

    def run(self) -> None:
        """Run one step: of trunks while any wait to be read, otherwise of branches."""
        began = time.perf_counter()
        for sequence in [each for each in (*self._waiting, *self._begun) if each.is_released]:
            self._waiting.pop(sequence, None)
            self._begun.pop(sequence, None)
        trunks = self._next_trunks()
        begun = [] if trunks else self._next_branches()
        try:
            if trunks:
                self._begin(trunks, began)
            elif begun:
                self._advance(begun, began)
        except Exception as error:
            logger.exception("background step failed")
            for job in [*(job for job, _ in trunks), *(each.job for each in begun)]:
                self._fail(job, error)
        finally:
            self._watchdog.end()

    def _next_trunks(self) -> list[tuple[BackgroundJob, Segment]]:
        """Take jobs that wait, as many as have trunks that fit into one step."""
        trunks: list[tuple[BackgroundJob, Segment]] = []
        tokens = 0
        for sequence, job in [*self._waiting.items()]:
            del self._waiting[sequence]
            count = self._unread(job)
            if not 0 < count <= _MAX_STEP_TOKENS:
                continue
            if tokens + count > _MAX_STEP_TOKENS:
                self._waiting[sequence] = job
                break
            trunks.append((job, Segment(sequence, count)))
            tokens += count
        return trunks

    def _unread(self, job: BackgroundJob) -> int:
        """Apply the job's delta; the tokens that are to be read then, 0 where nothing can follow."""
        sequence = job.sequence
        if not self._applied(job) or self._branches is None:
            return 0
        try:
            sequence.want_rows(job.row_count)
        except InvalidRequestError as error:
            job.fail(error)
            return 0
        if not self._cache.make_ready(sequence, sequence.length):
            return 0
        self._cache.take_spare(sequence, sequence.length + sequence.spare_tokens)
        return sequence.pending_count if sequence.table.capacity > sequence.length else 0

    def _next_branches(self) -> list[_Begun]:
        """Take jobs whose turn it is, as many as have branches that fit into one step."""
        taken: list[_Begun] = []
        tokens = 0
        for sequence, begun in [*self._begun.items()]:
            tokens += begun.part.count
            if taken and tokens > _MAX_STEP_TOKENS:
                break
            taken.append(self._begun.pop(sequence))
        return taken

    def _begin(self, trunks: SequenceOf[tuple[BackgroundJob, Segment]], began: float) -> None:
        rows: list[int] = []
        tokens = 0
        for job, segment in trunks:
            tokens += segment.token_count
            rows += range(tokens - job.row_count, tokens)
        self._watchdog.begin(tokens)
        logits = self._runner.run([segment for _, segment in trunks], rows)
        first = 0
        for job, segment in trunks:
            own, first = logits[first : first + job.row_count], first + job.row_count
            sequence = segment.sequence
            sequence.advance(segment.token_count)
            self._follow(job, partial(job.begin, own, sequence.table.capacity - sequence.length))
        self._count(len(trunks), tokens, len(rows), began)

    def _advance(self, begun: SequenceOf[_Begun], began: float) -> None:
        assert self._branches is not None, "without it no job begins"
        parts = [each.part for each in begun]
        tokens = sum(part.count for part in parts)
        self._watchdog.begin(tokens)
        logits = self._branches.run(parts)
        first = 0
        for each, part in zip(begun, parts, strict=True):
            own, first = logits[first : first + part.count], first + part.count
            self._follow(each.job, partial(each.job.advance, own))  # behind the others
        record = self._count(len(begun), tokens, tokens, began)
        for each in begun:
            each.job.count_step(record)

    def _follow(self, job: BackgroundJob, next_step: Callable[[], BranchStep | None]) -> None:
        """Let a job take its logits and say what to run next. Its failure is no other job's."""
        try:
            step = next_step()
        except Exception as error:
            logger.exception("background job failed")
            self._fail(job, error)
            return
        if step is not None:
            self._begun[job.sequence] = _Begun(job, step)

    def _fail(self, job: BackgroundJob, error: Exception) -> None:
        self._begun.pop(job.sequence, None)
        job.fail(error if isinstance(error, TandemError) else TandemError("the model's step failed"))

    def _applied(self, job: BackgroundJob) -> bool:
        """Apply the job's delta; true if it fits."""
        try:
            job.sequence.apply(job.delta)
        except InvalidRequestError as error:
            job.fail(error)
            return False
        return True

    def _count(self, sequences: int, tokens: int, rows: int, began: float) -> StepRecord:
        seconds = time.perf_counter() - began
        record = StepRecord(sequences, tokens, rows, seconds, seconds)
        if self._on_step is None:
            return record
        self._on_step(record)
        # Once more: the observer takes part in how long a step takes.
        return replace(record, seconds=time.perf_counter() - began)
