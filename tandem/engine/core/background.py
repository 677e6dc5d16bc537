"""Work that nobody waits for yet: branches that a draft drafts ahead, a step at a time while no job is there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from tandem.engine.core.jobs import StepRecord
from tandem.engine.core.timing import StepWatchdog
from tandem.engine.kv_cache.sequence import Segment, Sequence
from tandem.engine.steps import BranchStep, Machinery, SequenceBranches
from tandem.errors import InvalidRequestError, TandemError
from tandem.types import Delta, common_length

MAX_BYTES = 64 << 20
"""Logits of all sequences that are kept. With a vocabulary of 128k in binary32, a depth of 16 branches has 8 MB."""


@dataclass(frozen=True, slots=True, eq=False)
class Lead:
    """Tokens of a branch behind those that its sequence goes on with: the likeliest continuation has begun already."""

    token_ids: SequenceOf[int]
    """At least one."""
    logits: Tensor
    """Those that follow each of them, [tokens, vocabulary_size]."""


@dataclass(frozen=True, slots=True, eq=False)
class Continuation:
    """The branch that a sequence goes on with, as far as it was computed."""

    positions: SequenceOf[int]
    """Where the keys and values of its tokens lie now, and behind them those of the lead."""
    logits: Tensor
    """Those that follow each of the sequence's tokens that the branch has, [tokens, vocabulary_size]."""
    lead: Lead | None = None
    """Tokens that the branch has behind the sequence's last one."""


@dataclass(slots=True)
class _Branches:
    trunk_length: int
    """Tokens before the branches, the lead included."""
    trunk_lengths: SequenceOf[int]
    lead: Lead | None
    token_ids: list[SequenceOf[int]] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def first_position(self, branch: int) -> int:
        """The position at which a branch leaves the tokens that were certain."""
        return self.trunk_lengths[branch] - len(self._led(branch))

    def path(self, branch: int) -> list[int]:
        """A branch's tokens, those of the lead included."""
        return [*self._led(branch), *(own[branch] for own in self.token_ids if branch < len(own))]

    def positions(self, branch: int, count: int) -> list[int]:
        """Where the first tokens of a branch's path lie."""
        led, width = len(self._led(branch)), len(self.trunk_lengths)
        certain, behind = self.first_position(branch), self.trunk_length + branch
        return [certain + i if i < led else behind + (i - led) * width for i in range(count)]

    def rows(self, branch: int, first: int, end: int) -> Tensor:
        """Logits that follow some tokens of a branch's path, [end - first, vocabulary_size]."""
        led = [] if self.lead is None or not self._led(branch) else [*self.lead.logits]
        own = [logits[branch] for logits in self.logits[: max(end - len(led), 0)]]
        return torch.stack([*led, *own][first:end])

    def _led(self, branch: int) -> SequenceOf[int]:
        has_lead = self.lead is not None and self.trunk_lengths[branch] == self.trunk_length
        return self.lead.token_ids if self.lead is not None and has_lead else ()


class KeptBranches:
    """The branches of sequences that have computed nothing since."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        """Keep `max_bytes` of logits at most. Branches beyond it are computed again."""
        self._max_bytes = max_bytes
        self._branches: dict[Sequence, _Branches] = {}

    def add(self, part: SequenceBranches, logits: Tensor, lead: Lead | None = None) -> None:
        """Keep a step of a sequence's branches: a copy of the logits that follow each branch's token, [branches, V].

        Only the branches from the trunk's end go on with the lead.
        """
        sequence, step = part.sequence, part.step
        if step.depth == 0:
            self._branches[sequence] = _Branches(sequence.length, step.trunk_lengths, lead)
        kept = self._branches.get(sequence)
        if kept is None:
            return
        others = sum(each.nbytes for branches in self._branches.values() for each in branches.logits)
        if logits.nbytes + others > self._max_bytes:
            del self._branches[sequence]
            return
        kept.token_ids.append(step.token_ids)
        kept.logits.append(logits.clone())

    def take(self, sequence: Sequence, max_lead: int) -> Continuation | None:
        """The branch that the sequence's uncomputed tokens begin with, None for another continuation.

        The other branches are forgotten, and tokens more than `max_lead` behind the sequence's last one.
        """
        kept = self._branches.pop(sequence, None)
        if kept is None:
            return None
        pending = sequence.token_ids[sequence.computed_length :]
        for branch in range(len(kept.trunk_lengths)):
            if kept.first_position(branch) != sequence.computed_length:
                continue
            path = kept.path(branch)
            count = common_length(path, pending)
            if not count:
                continue
            further = path[count : count + max_lead] if count == len(pending) else []
            end = count + len(further)
            lead = Lead(further, kept.rows(branch, count, end)) if further else None
            return Continuation(kept.positions(branch, end), kept.rows(branch, 0, count), lead)
        return None

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence's branches, whose places others may write to from now on."""
        self._branches.pop(sequence, None)


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

    @property
    def max_lead(self) -> int:
        """Number of tokens behind the trunk that are of use if a branch of the sequence's last job has them."""

    def begin(self, logits: Tensor, room: int, lead: Lead | None) -> BranchStep | None:
        """Choose the branches.

        Args:
            logits: [row_count, vocabulary_size] of the trunk's last positions.
            room: Tokens that fit behind the trunk and the lead.
            lead: Tokens behind the trunk that are in the cache; a branch may go on behind them.

        Returns:
            The first step; None for no branches.
        """

    def advance(self, logits: Tensor) -> BranchStep | None:
        """Take the logits that follow each branch, [branches, vocabulary_size], and return what to run next."""

    def count_step(self, record: StepRecord) -> None:
        """A step of branches has ended, with what `advance` made of it."""

    def fail(self, error: TandemError) -> None:
        """End with an error."""


logger = logging.getLogger(__name__)

_MAX_STEP_TOKENS = 256
"""Maximum tokens of trunks and branches in a step: a longer step would delay jobs that arrive meanwhile."""


@dataclass(frozen=True, slots=True, eq=False)
class _Trunk:
    """A job's trunk, as far as it has yet to be read."""

    job: BackgroundJob
    room: int
    """Tokens that fit behind it."""
    known: SequenceOf[Tensor] = ()
    """Logits of the first of its last positions, [positions, vocabulary_size], that a branch has computed before."""
    lead: Lead | None = None

    @property
    def row_count(self) -> int:
        return self.job.row_count - sum(len(logits) for logits in self.known)


@dataclass(slots=True)
class _Begun:
    job: BackgroundJob
    step: BranchStep
    """The one that is to come."""
    lead: Lead | None

    @property
    def part(self) -> SequenceBranches:
        return SequenceBranches(self.job.sequence, self.step)


class BackgroundWork:
    """The jobs in the background, at most one for each sequence. They share steps."""

    def __init__(
        self, machinery: Machinery, on_step: Callable[[StepRecord], None], watchdog: StepWatchdog
    ) -> None:
        self._cache = machinery.cache  # gives pages as far as nobody else holds them
        self._runner = machinery.runner
        self._on_step = on_step
        self._watchdog = watchdog
        self._waiting: dict[Sequence, BackgroundJob] = {}
        self._begun: dict[Sequence, _Begun] = {}
        self._kept = KeptBranches(MAX_BYTES if self._runner.writes_behind_trunk else 0)

    @property
    def is_empty(self) -> bool:
        return not (self._waiting or self._begun)

    def add(self, job: BackgroundJob) -> None:
        """Take a job, in place of the sequence's last one. The delta may go on with a branch of that one."""
        self._end(job.sequence)
        self._waiting[job.sequence] = job

    def drop(self, sequence: Sequence) -> None:
        """Do no more for a sequence. Its tokens are then those of its last job's delta."""
        self._end(sequence)
        self._kept.forget(sequence)

    def _end(self, sequence: Sequence) -> None:
        self._begun.pop(sequence, None)
        job = self._waiting.pop(sequence, None)
        if job is not None and not sequence.is_released:
            self._applied(job)

    def run(self) -> None:
        """Run one step: of trunks while any wait to be read, otherwise of branches."""
        began = time.perf_counter()
        for sequence in [each for each in (*self._waiting, *self._begun) if each.is_released]:
            self.drop(sequence)
        trunks = self._next_trunks()
        begun = [] if trunks else self._next_branches()
        try:
            if trunks:
                self._read(trunks, began)
            elif begun:
                self._advance(begun, began)
        except Exception as error:
            logger.exception("background step failed")
            for job in [*(trunk.job for trunk in trunks), *(each.job for each in begun)]:
                self._fail(job, error)
        finally:
            self._watchdog.end()

    def _next_trunks(self) -> list[_Trunk]:
        """Take jobs that wait, as many as have trunks that fit into one step. Those with nothing to read begin."""
        trunks: list[_Trunk] = []
        tokens = 0
        for sequence, job in [*self._waiting.items()]:
            del self._waiting[sequence]
            try:
                trunk = self._prepared(job)
            except Exception as error:
                logger.exception("background job failed")
                self._fail(job, error)
                continue
            count = sequence.pending_count
            if trunk is None or count > _MAX_STEP_TOKENS:
                continue
            if tokens + count > _MAX_STEP_TOKENS:
                self._waiting[sequence] = job
                break
            if not count:
                self._begin(trunk)
                continue
            trunks.append(trunk)
            tokens += count
        return trunks

    def _prepared(self, job: BackgroundJob) -> _Trunk | None:
        """Apply the job's delta, and take over what a branch has computed of it; None where nothing can follow."""
        sequence = job.sequence
        if not self._applied(job) or not self._runner.can_branch:
            return None
        try:
            sequence.want_rows(job.row_count)
        except InvalidRequestError as error:
            job.fail(error)
            return None
        if not self._cache.make_ready(sequence, sequence.length):
            return None
        unwanted = sequence.pending_count - job.row_count
        continuation = self._kept.take(sequence, min(job.max_lead, sequence.free_places))
        if continuation is not None:
            sequence.token_ids += continuation.lead.token_ids if continuation.lead else ()
            self._cache.take_over(sequence, continuation.positions)
        room = self._cache.take_spare(sequence, sequence.spare_tokens)
        if room <= 0:
            return None
        if continuation is None:
            return _Trunk(job, room)
        # When the trunk of the job before was never read, the branch begins at tokens whose logits this job does not
        # want: a hit on top of a hit.
        return _Trunk(job, room, (continuation.logits[unwanted:],), continuation.lead)

    def _next_branches(self) -> list[_Begun]:
        """Take jobs whose turn it is, as many as have branches that fit into one step."""
        taken: list[_Begun] = []
        tokens = 0
        for sequence, begun in [*self._begun.items()]:
            tokens += begun.part.token_count
            if taken and tokens > _MAX_STEP_TOKENS:
                break
            taken.append(self._begun.pop(sequence))
        return taken

    def _read(self, trunks: SequenceOf[_Trunk], began: float) -> None:
        segments = [Segment(trunk.job.sequence, trunk.job.sequence.pending_count) for trunk in trunks]
        ends = list(accumulate(segment.token_count for segment in segments))
        counts = [trunk.row_count for trunk in trunks]
        rows = [row for end, count in zip(ends, counts, strict=True) for row in range(end - count, end)]
        self._watchdog.begin(ends[-1])
        parts = _parts(self._runner.run(segments, rows), counts)
        for trunk, segment, own in zip(trunks, segments, parts, strict=True):
            segment.sequence.advance(segment.token_count)
            self._begin(trunk, own)
        self._count(len(trunks), ends[-1], len(rows), began)

    def _begin(self, trunk: _Trunk, *logits: Tensor) -> None:
        """Let a job choose its branches, by the logits that were known and those of what was read now."""
        parts = (*trunk.known, *logits)
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._follow(trunk.job, partial(trunk.job.begin, rows, trunk.room, trunk.lead), trunk.lead)

    def _advance(self, begun: SequenceOf[_Begun], began: float) -> None:
        parts = [each.part for each in begun]
        counts = [part.token_count for part in parts]
        tokens = sum(counts)
        self._watchdog.begin(tokens)
        logits = _parts(self._runner.run_branches(parts), counts)
        for each, part, own in zip(begun, parts, logits, strict=True):
            self._kept.add(part, own, each.lead)
            self._follow(each.job, partial(each.job.advance, own), each.lead)  # behind the others
        record = self._count(len(begun), tokens, tokens, began)
        for each in begun:
            each.job.count_step(record)

    def _follow(
        self, job: BackgroundJob, next_step: Callable[[], BranchStep | None], lead: Lead | None
    ) -> None:
        """Let a job take its logits and say what to run next. Its failure is no other job's."""
        try:
            step = next_step()
        except Exception as error:
            logger.exception("background job failed")
            self._fail(job, error)
            return
        if step is not None:
            self._begun[job.sequence] = _Begun(job, step, lead)

    def _fail(self, job: BackgroundJob, error: Exception) -> None:
        self._begun.pop(job.sequence, None)
        job.fail(error if isinstance(error, TandemError) else TandemError("the model's step failed"))

    def _applied(self, job: BackgroundJob) -> bool:
        try:
            job.sequence.apply(job.delta)
        except InvalidRequestError as error:
            job.fail(error)
            return False
        return True

    def _count(self, sequences: int, tokens: int, rows: int, began: float) -> StepRecord:
        seconds = time.perf_counter() - began
        record = StepRecord(sequences, tokens, rows, seconds, seconds)
        self._on_step(record)
        # Once more: the observer takes part in how long a step takes.
        return replace(record, seconds=time.perf_counter() - began)


def _parts(logits: Tensor, counts: SequenceOf[int]) -> list[Tensor]:
    """The rows of each part, by slices alone: they may be of logits that another process keeps."""
    return [logits[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]
