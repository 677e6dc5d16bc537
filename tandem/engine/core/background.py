"""Work that nobody waits for yet: branches that a draft drafts ahead, a step at a time while no job is there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem.engine.core.jobs import ResultT, StepRecord
from tandem.engine.core.timing import StepWatchdog
from tandem.engine.kv_cache.sequence import Segment, Sequence, SequenceCache
from tandem.engine.steps import BranchDraws, BranchStep, StepBackend
from tandem.errors import InvalidRequestError, TandemError
from tandem.model.types import Delta, common_length

MAX_BYTES = 64 << 20
"""Logits of all sequences that are kept. With a vocabulary of 128k in binary32, a depth of 16 branches has 8 MB."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadStart:
    """Tokens of a branch behind those that its sequence goes on with: the likeliest continuation has begun already."""

    token_ids: SequenceOf[int]
    """At least one."""
    logits: Tensor
    """Those that follow each of them, [tokens, vocabulary_size]."""


class BackgroundJob(Protocol):
    """Branches of one sequence. Every method is called on the engine's thread."""

    @property
    def sequence(self) -> Sequence: ...
    @property
    def delta(self) -> Delta:
        """Makes the sequence the trunk. It is applied in any case, also when the work is never begun."""

    @property
    def row_count(self) -> int:
        """Number of the trunk's last positions whose logits decide where it branches."""

    @property
    def max_lead(self) -> int:
        """Number of tokens behind the trunk that are of use if a branch of the sequence's last job has them."""

    def begin(self, logits: Tensor, room: int, lead: HeadStart | None) -> BranchStep | None:
        """Choose the branches by the logits of the trunk's last positions, [row_count, vocabulary_size]; the first
        step, or None for no branches. `room` counts tokens that fit behind the trunk and the lead, whose tokens are in
        the cache and which a branch may go on behind."""

    def advance(self, logits: Tensor) -> BranchStep | None:
        """Take the logits that follow each branch, [branches, vocabulary_size], and return what to run next."""

    @property
    def draws(self) -> BranchDraws | None:
        """Draws all tokens of the branches in a row, in place of `advance`; None where that needs the host."""

    def take(self, drawn: SequenceOf[Any]) -> None:
        """Take what was drawn like that, for each branch."""

    def count_step(self, record: StepRecord) -> None:
        """A step of branches has ended, with what `advance` made of it."""

    def fail(self, error: TandemError) -> None:
        """End with an error."""


logger = logging.getLogger(__name__)

_MAX_STEP_TOKENS = 256
"""Maximum tokens of trunks and branches in a step: a longer step would delay jobs that arrive meanwhile."""


@dataclass(slots=True, eq=False)
class _Branches:
    """A job whose trunk is read or about to be, and what was computed of its branches."""

    job: BackgroundJob
    room: int
    known: SequenceOf[Tensor] = ()
    """Logits of the first of the trunk's last positions, [positions, vocabulary_size], that a branch of the sequence's
    job before has computed."""
    lead: HeadStart | None = None
    trunk_length: int = 0
    """Tokens before the branches, the lead included."""
    ran: list[tuple[BranchStep, Tensor]] = field(default_factory=list)
    """Steps, and the logits that follow each branch's token, [branches, vocabulary_size]."""

    @property
    def row_count(self) -> int:
        return self.job.row_count - sum(len(logits) for logits in self.known)

    def continuation(self, max_lead: int) -> tuple[list[int], Tensor, HeadStart | None] | None:
        """The branch that the sequence's uncomputed tokens begin with, as far as it was computed; None for another
        continuation. Only the branches from the trunk's end go on with the lead. Returns the places of its tokens' keys
        and values; the logits that follow each of those tokens which the sequence has; and up to `max_lead` tokens that
        the branch has behind the sequence's last one."""
        sequence = self.job.sequence
        pending = sequence.token_ids[sequence.computed_length :]
        for branch, length in enumerate(self.ran[0][0].trunk_lengths if self.ran else ()):
            lead = self.lead if length == self.trunk_length else None
            led = [] if lead is None else [*lead.token_ids]
            own = [(step, logits) for step, logits in self.ran if branch < len(step.token_ids)]
            path = [*led, *(step.token_ids[branch] for step, _ in own)]
            count = common_length(path, pending)
            if length - len(led) != sequence.computed_length or not count:
                continue
            further = path[count : count + max_lead] if count == len(pending) else []
            end = count + len(further)
            behind = [self.trunk_length + step.depth * len(step.trunk_lengths) + branch for step, _ in own]
            places = [*range(length - len(led), length), *behind]
            rows = [*(() if lead is None else lead.logits), *(logits[branch] for _, logits in own)]
            known = torch.stack(rows[:end])
            return places[:end], known[:count], HeadStart(further, known[count:]) if further else None
        return None


class BackgroundWork:
    """The jobs in the background, at most one for each sequence. They share steps."""

    def __init__(
        self,
        cache: SequenceCache,
        runner: StepBackend,
        on_step: Callable[[StepRecord], StepRecord],
        watchdog: StepWatchdog,
    ) -> None:
        self._cache = cache  # gives pages as far as nobody else holds them
        self._runner = runner
        self._on_step = on_step
        self._watchdog = watchdog
        self._waiting: dict[Sequence, BackgroundJob] = {}
        self._begun: dict[Sequence, tuple[_Branches, BranchStep]] = {}
        """Those with a step to come, in the order of their turns."""
        self._kept: dict[Sequence, _Branches] = {}
        """The branches of sequences that have computed nothing since, for the next job's delta."""
        self.max_step_tokens = _MAX_STEP_TOKENS
        self._max_bytes = MAX_BYTES if self._runner.writes_behind_trunk else 0

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
        self._kept.pop(sequence, None)

    def _end(self, sequence: Sequence) -> None:
        self._begun.pop(sequence, None)
        job = self._waiting.pop(sequence, None)
        if job is not None and not sequence.is_released:
            self._try(job, partial(sequence.apply, job.delta))

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
            for each in (*trunks, *(branches for branches, _ in begun)):
                self._fail(each.job, error)
        finally:
            self._watchdog.end()

    def _next_trunks(self) -> list[_Branches]:
        """Take jobs that wait, as many as have trunks that fit into one step. Those with nothing to read begin."""
        trunks: list[_Branches] = []
        tokens = 0
        for sequence, job in [*self._waiting.items()]:
            del self._waiting[sequence]
            trunk = self._try(job, partial(self._prepare, job))
            count = sequence.pending_count
            if trunk is None or count > self.max_step_tokens:
                continue
            if tokens + count > self.max_step_tokens:
                self._waiting[sequence] = job
                break
            if not count:
                self._begin(trunk)
                continue
            trunks.append(trunk)
            tokens += count
        return trunks

    def _prepare(self, job: BackgroundJob) -> _Branches | None:
        """Apply the job's delta, and take over what a branch has computed of it; None where nothing can follow."""
        sequence = job.sequence
        sequence.apply(job.delta)
        if not self._runner.can_branch:
            return None
        sequence.want_rows(job.row_count)
        if not self._cache.make_ready(sequence, sequence.length):
            return None
        unwanted = sequence.pending_count - job.row_count
        last = self._kept.pop(sequence, None)
        max_lead = min(job.max_lead, sequence.free_places)
        known: tuple[Tensor, ...] = ()
        lead = None
        if last is not None and (continued := last.continuation(max_lead)) is not None:
            places, logits, lead = continued
            # When the trunk of the job before was never read, the branch begins at tokens whose logits this job does
            # not want: a hit on top of a hit.
            known = (logits[unwanted:],)
            sequence.token_ids += lead.token_ids if lead else ()
            self._cache.take_over(sequence, places)
        room = self._cache.take_spare(sequence, sequence.spare_tokens)
        return _Branches(job, room, known, lead) if room > 0 else None

    def _next_branches(self) -> list[tuple[_Branches, BranchStep]]:
        """Take jobs whose turn it is, at least one, as many as have branches that fit into one step."""
        begun = [*self._begun.items()]
        ends = accumulate(step.token_count for _, (_, step) in begun)
        count = max(sum(end <= self.max_step_tokens for end in ends), 1)
        return [self._begun.pop(sequence) for sequence, _ in begun[:count]]

    def _read(self, trunks: SequenceOf[_Branches], began: float) -> None:
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

    def _begin(self, trunk: _Branches, *logits: Tensor) -> None:
        """Let a job choose its branches, by the logits that were known and those of what was read now."""
        parts = (*trunk.known, *logits)
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        trunk.known = ()
        self._follow(trunk, partial(trunk.job.begin, rows, trunk.room, trunk.lead))

    def _advance(self, begun: SequenceOf[tuple[_Branches, BranchStep]], began: float) -> None:
        steps = [step for _, step in begun]
        counts = [step.token_count for step in steps]
        tokens = sum(counts)
        self._watchdog.begin(tokens)
        if self._draw(begun, steps, began):
            return
        logits = _parts(self._runner.run_branches(steps), counts)
        for (branches, step), own in zip(begun, logits, strict=True):
            self._keep(branches, step, own)
            self._follow(branches, partial(branches.job.advance, own))  # behind the others
        record = self._count(len(begun), tokens, tokens, began)
        for branches, _ in begun:
            branches.job.count_step(record)

    def _draw(
        self,
        begun: SequenceOf[tuple[_Branches, BranchStep]],
        steps: SequenceOf[BranchStep],
        began: float,
    ) -> bool:
        """Run all steps of these branches in a row; false if they need the host in between."""
        if not self._runner.draws_branches:
            return False
        given = [branches.job.draws for branches, _ in begun]
        draws = [each for each in given if each is not None]
        if len(draws) < len(given):
            return False
        for (branches, _), drawn in zip(begun, self._runner.draw_branches(steps, draws), strict=True):
            if drawn is not None:
                self._try(branches.job, partial(branches.job.take, drawn))
        passes = max(each.count for each in draws)
        tokens = sum(step.token_count * each.count for step, each in zip(steps, draws, strict=True))
        record = self._count(len(begun), tokens, tokens, began, passes)
        for branches, _ in begun:
            branches.job.count_step(record)
        return True

    def _keep(self, branches: _Branches, step: BranchStep, logits: Tensor) -> None:
        """Keep a copy of a step's logits while there is room. Branches without are computed again."""
        sequence = step.sequence
        if step.depth == 0:
            branches.trunk_length = sequence.length
            self._kept[sequence] = branches
        elif self._kept.get(sequence) is not branches:
            return
        others = sum(own.nbytes for kept in self._kept.values() for _, own in kept.ran)
        if logits.nbytes + others > self._max_bytes:
            del self._kept[sequence]
        else:
            branches.ran.append((step, logits.clone()))

    def _follow(self, branches: _Branches, next_step: Callable[[], BranchStep | None]) -> None:
        """Let a job take its logits and say what to run next."""
        step = self._try(branches.job, next_step)
        if step is not None:
            self._begun[step.sequence] = branches, step

    def _try(self, job: BackgroundJob, act: Callable[[], ResultT]) -> ResultT | None:
        """Do a job's part. Its failure, for which this returns None, is no other job's."""
        try:
            return act()
        except InvalidRequestError as error:
            self._fail(job, error)
        except Exception as error:
            logger.exception("background job failed")
            self._fail(job, error)
        return None

    def _fail(self, job: BackgroundJob, error: Exception) -> None:
        self._begun.pop(job.sequence, None)
        job.fail(error if isinstance(error, TandemError) else TandemError("the model's step failed"))

    def _count(self, sequences: int, tokens: int, rows: int, began: float, passes: int = 1) -> StepRecord:
        seconds = time.perf_counter() - began
        return self._on_step(StepRecord(sequences, tokens, rows, seconds, seconds, passes))


def _parts(logits: Tensor, counts: SequenceOf[int]) -> list[Tensor]:
    """The rows of each part, by slices alone: they may be of logits that another process keeps."""
    return [logits[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]
