"""Jobs for an engine, those that follow others by themselves, and the heads that make their answers."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from torch import Tensor

from tandem.engine.kv_cache.sequence import Sequence
from tandem.engine.steps import ModelRunner
from tandem.errors import NonFiniteLogitsError, TandemError
from tandem.model.types import (
    TOKEN_BOUNDS,
    Delta,
    HiddenStates,
    Proposal,
    StepCost,
    TokenHistogram,
    Verification,
)

PayloadT = TypeVar("PayloadT")
ResultT = TypeVar("ResultT")


@dataclass(slots=True, eq=False)
class Job(Generic[PayloadT]):
    """One request: a delta to apply and rows wanted of what then stands at the end of the sequence. Run once."""

    sequence: Sequence
    delta: Delta
    row_count: int
    """Rows for so many last positions, 1 after `Continue`. 0 computes keys and values only: the result is None."""
    payload: PayloadT
    lead: int = 0
    """How many jobs may follow this one by themselves."""
    on_led: Callable[[PayloadT, Any], None] | None = None
    """Takes the payload and the result of a job that follows by itself, on the event loop."""
    withheld: int | None = None
    """The last token, where it is added once a drafter has proposed what may follow it: what the drafter reads of the
    tokens before it is computed first."""
    prepared: Future[Any] | None = field(default=None, init=False)
    """Computed for the head by another thread, beside the forward pass whose rows complete the job."""
    future: asyncio.Future[object] | None = field(default=None, init=False)
    cost: StepCost | None = field(default=None, init=False)
    """Of the steps so far, including all of their sequences."""
    is_cancelled: bool = field(default=False, init=False)

    def count_step(self, seconds: float, sequences: int, tokens: int) -> None:
        so_far = self.cost or StepCost(0.0, 0, 0)
        most = max(so_far.sequences, sequences)
        self.cost = StepCost(so_far.seconds + seconds, most, so_far.tokens + tokens)

    @property
    def is_abandoned(self) -> bool:
        """True if the engine should drop the job before its next step."""
        return self.is_cancelled or self.sequence.is_released


@dataclass(frozen=True, slots=True)
class Done(Generic[ResultT]):
    """The job is finished."""

    result: ResultT
    go_on: Callable[[], tuple[ResultT, Job[Any] | None]] | None = None
    """Decides at the end of the step how the sequence goes on by itself: the result, which says so, and the job that
    follows as far as a lead allows. None: it does not."""


@dataclass(frozen=True, slots=True)
class Continue:
    """Append a token to the job's sequence and call the head again with the row that follows it."""

    token_id: int


@dataclass(frozen=True, slots=True)
class Extended:
    """The model has already run these tokens behind the job's sequence, one after the other; then comes the outcome."""

    token_ids: SequenceOf[int]
    outcome: Done[Any] | Failed | Continue


@dataclass(frozen=True, slots=True)
class Failed:
    """The job has no result; its sequence is computed again, since its keys and values cannot be trusted."""

    error: TandemError


HeadOutcome: TypeAlias = Done[ResultT] | Failed | Continue | Extended
"""What becomes of a job whose rows are computed."""

Head: TypeAlias = Callable[[SequenceOf[Job[PayloadT]], Tensor], SequenceOf[HeadOutcome[ResultT]]]
"""Returns an outcome for each job whose rows are computed, in order, by logits [sum of their row_count,
vocabulary_size] in the model's dtype, on its device. Called on the engine's thread; a slow head delays everybody."""


class Drafter(Protocol):
    """Proposes on the engine's thread, between two of its steps. Every method is called there."""

    def propose(self, jobs: SequenceOf[Job[Any]]) -> SequenceOf[Proposal]:
        """A proposal for each job, behind the token that it withholds; an empty one where there is none."""

    def begin(self, job: Job[Any]) -> None:
        """A job is about to apply its delta, with which its sequence's tokens change from there on."""

    def begin_step(self) -> None:
        """A step begins, for which proposals have been made where any were wanted."""

    def release(self, sequence: Sequence) -> None:
        """The sequence is gone."""

    @property
    def overdue_seconds(self) -> float:
        """See `RunningModel`. Called on any thread."""


class FeatureReader(Protocol):
    """Reads hidden states of a step's sequences for heads on other devices. Every method is called on the engine's
    thread."""

    def read(
        self, jobs: SequenceOf[Job[Any]], answers: SequenceOf[Verification | None]
    ) -> SequenceOf[HiddenStates | None]:
        """The states that each job's sequence has asked for and not been given yet."""

    def release(self, sequence: Sequence) -> None:
        """The sequence is gone."""


def non_finite(length: int) -> Failed:
    """The failure of a job whose logits after so many tokens are not finite."""
    return Failed(NonFiniteLogitsError(f"the model's logits after {length} tokens are not finite numbers"))


def finite_head(model: ModelRunner, ready: SequenceOf[Job[Any]], logits: Any) -> list[Done[None] | Failed]:
    """A head that only looks whether the rows of all jobs are good; for the start, when waiting costs nothing."""
    if model.are_finite(logits):
        return [Done(None) for _ in ready]
    info = model.info
    error = NonFiniteLogitsError(
        f"the model {info.name} computes logits that are not finite numbers in {info.dtype}: its weights or its "
        "config.json are damaged, or the dtype is too narrow for it"
    )
    return [Failed(error) for _ in ready]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, with its time in the forward pass, and in all with the head."""

    sequence_count: int
    token_count: int
    row_count: int
    model_seconds: float
    seconds: float
    pass_count: int = 1
    """Forward passes: the head may have run further tokens, which are counted in."""


class StepTokens:
    """Counts steps by their tokens. Only the engine's thread writes."""

    def __init__(self) -> None:
        self._counts = [0] * (len(TOKEN_BOUNDS) + 1)
        self._sum = 0

    def add(self, token_count: int) -> None:
        self._counts[bisect_left(TOKEN_BOUNDS, token_count)] += 1
        self._sum += token_count

    @property
    def histogram(self) -> TokenHistogram:
        return TokenHistogram(TOKEN_BOUNDS, tuple(self._counts), self._sum)


@dataclass(slots=True)
class _LedJobs:
    """Jobs of one sequence by number: 0 is the one that was submitted."""

    allowed: int
    """The last that may begin."""
    asked: int = 0
    """The last that somebody waits for, or waited for."""
    begun: int = 0
    """The last that has begun."""
    waiting: Job[Any] | None = None
    """The one after that, until it may begin."""


class Leads:
    """Sequences that go on by themselves: an answered job may be followed by jobs that nobody has asked for yet. Every
    method is called on the engine's thread."""

    def __init__(self) -> None:
        self._leads: dict[Sequence, _LedJobs] = {}
        self.begun_count = 0
        self.wasted_count = 0
        """Those of them that nobody asked for until their lead ended."""

    def follow(self, job: Job[Any], following: Job[Any]) -> Job[Any] | None:
        """Let one job follow another that was answered; returns it if it may begin."""
        lead = self._leads.setdefault(job.sequence, _LedJobs(allowed=job.lead))
        lead.waiting = following
        return self._next(lead)

    def grant(self, sequence: Sequence, asked: int, count: int) -> Job[Any] | None:
        """The job of that number was asked for, and so many may begin behind it; returns the one that may now."""
        if (lead := self._leads.get(sequence)) is None:
            return None
        lead.asked = asked
        lead.allowed = asked + count
        return self._next(lead)

    def end(self, sequence: Sequence) -> bool:
        """End a sequence's lead; false if it has none. Its job, if one runs, is of no use."""
        lead = self._leads.pop(sequence, None)
        if lead is not None:
            self.wasted_count += max(lead.begun - lead.asked, 0)
        return lead is not None

    def is_ahead(self, sequence: Sequence) -> bool:
        """True if nobody waits for the sequence's job yet."""
        lead = self._leads.get(sequence)
        return lead is not None and lead.begun > lead.asked

    def _next(self, lead: _LedJobs) -> Job[Any] | None:
        if lead.waiting is None or lead.begun >= lead.allowed:
            return None
        job = lead.waiting
        lead.waiting = None
        lead.begun += 1
        self.begun_count += 1
        return job
