"""Work that nobody waits for yet: it is done a step at a time, while no job is there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from tandem.engine.backends.branches import BranchRunner, BranchStep
from tandem.engine.core.events import StepRecord
from tandem.engine.core.runner import StepRunner
from tandem.engine.core.watchdog import StepWatchdog
from tandem.engine.kv_cache.segment import Segment
from tandem.engine.kv_cache.sequence import Sequence
from tandem.errors import InvalidRequestError, TandemError
from tandem.types import Delta

logger = logging.getLogger(__name__)

_MAX_TRUNK_TOKENS = 256
"""Work that would have to read more tokens first is not begun: it would hold up the jobs that come meanwhile."""


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


class BackgroundWork:
    """The jobs in the background, at most one for each sequence. They take turns, a step each."""

    def __init__(
        self,
        runner: StepRunner,
        branches: BranchRunner | None,
        on_step: Callable[[StepRecord], None] | None,
        watchdog: StepWatchdog,
    ) -> None:
        """
        Args:
            runner: Runs the trunks.
            branches: Runs the branches; None where the model cannot: deltas are applied, and that is all.
            on_step: Told of each step.
            watchdog: Times the steps.
        """
        self._runner = runner
        self._branches = branches
        self._on_step = on_step
        self._watchdog = watchdog
        self._waiting: dict[Sequence, BackgroundJob] = {}
        self._branching: dict[Sequence, tuple[BackgroundJob, BranchStep]] = {}

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to do."""
        return not (self._waiting or self._branching)

    def add(self, job: BackgroundJob) -> None:
        """Take a job, in place of the sequence's last one."""
        self.drop(job.sequence)
        self._waiting[job.sequence] = job

    def drop(self, sequence: Sequence) -> None:
        """Do no more for a sequence. Its tokens are then those of its last job's delta."""
        self._branching.pop(sequence, None)
        job = self._waiting.pop(sequence, None)
        if job is not None and not sequence.is_released:
            self._applied(job)

    def run(self) -> None:
        """Run one step of the job whose turn it is."""
        began = time.perf_counter()
        sequence = next(iter(self._waiting), None) or next(iter(self._branching))
        job = self._waiting.get(sequence) or self._branching[sequence][0]
        try:
            if sequence.is_released:
                self._forget(sequence)
            elif sequence in self._waiting:
                self._begin(job, began)
            else:
                self._advance(sequence, began)
        except Exception as error:
            logger.exception("background step failed")
            self._forget(sequence)
            job.fail(error if isinstance(error, TandemError) else TandemError("the model's step failed"))
        finally:
            self._watchdog.end()

    def _forget(self, sequence: Sequence) -> None:
        self._waiting.pop(sequence, None)
        self._branching.pop(sequence, None)

    def _applied(self, job: BackgroundJob) -> bool:
        """Apply the job's delta; true if it fits."""
        try:
            job.sequence.apply(job.delta)
        except InvalidRequestError as error:
            job.fail(error)
            return False
        return True

    def _begin(self, job: BackgroundJob, began: float) -> None:
        sequence = job.sequence
        del self._waiting[sequence]
        if not self._applied(job) or self._branches is None:
            return
        sequence.want_rows(job.row_count)
        count = sequence.pending_count
        room = sequence.extent.capacity - sequence.length
        if count > _MAX_TRUNK_TOKENS or room <= 0:
            return
        self._watchdog.begin(count)
        logits = self._runner.run([Segment(sequence, count)], range(count - job.row_count, count))
        sequence.advance(count)
        step = job.begin(logits, room)
        self._count(job, count, job.row_count, began)
        if step is not None:
            self._branching[sequence] = job, step

    def _advance(self, sequence: Sequence, began: float) -> None:
        assert self._branches is not None
        job, step = self._branching.pop(sequence)
        count = len(step.token_ids)
        self._watchdog.begin(count)
        logits = self._branches.run(sequence, step)
        following = job.advance(logits)
        job.count_step(self._count(job, count, count, began))
        if following is not None:
            self._branching[sequence] = job, following  # behind the others

    def _count(self, job: BackgroundJob, tokens: int, rows: int, began: float) -> StepRecord:
        seconds = time.perf_counter() - began
        record = StepRecord(1, tokens, rows, seconds, seconds)
        if self._on_step is None:
            return record
        self._on_step(record)
        # Once more: the observer takes part in how long a step takes.
        return replace(record, seconds=time.perf_counter() - began)
