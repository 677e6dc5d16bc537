"""Jobs for an engine, the heads that make their answers, and the record of a step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from torch import Tensor

from tandem.engine.kv_cache.sequence import Sequence
from tandem.engine.steps import ModelRunner
from tandem.errors import NonFiniteLogitsError, TandemError
from tandem.types import Delta, StepCost

PayloadT = TypeVar("PayloadT")
ResultT = TypeVar("ResultT")


@dataclass(slots=True, eq=False)
class Job(Generic[PayloadT]):
    """One request: a delta to apply and rows wanted of what then stands at the end of the sequence.

    `row_count` 0 only computes keys and values; the head is then not called and the result is None.
    """

    sequence: Sequence
    delta: Delta
    row_count: int
    """Rows for the last `row_count` positions. 1 after the head returned `Continue`."""
    payload: PayloadT
    """Data for the head; the engine does not read it."""
    lead: int = 0
    """How many jobs may follow this one by themselves."""
    on_result: Callable[[Job[PayloadT], object], None] | None = None
    """Takes the result of a job that follows by itself, on the event loop."""
    prepared: Future[Any] | None = field(default=None, init=False)
    """Computed for the head by another thread, beside the forward pass whose rows complete the job."""
    future: asyncio.Future[object] | None = field(default=None, init=False)
    """Set by the engine when the job is submitted."""
    cost: StepCost | None = field(default=None, init=False)
    """Cost of the steps so far, including all of their sequences; None before the first."""
    is_cancelled: bool = field(default=False, init=False)
    """The caller no longer waits for the result."""

    def count_step(self, seconds: float, sequences: int, tokens: int) -> None:
        if self.cost is None:
            self.cost = StepCost(seconds, sequences, tokens)
        else:
            so_far = self.cost
            self.cost = StepCost(
                so_far.seconds + seconds, max(so_far.sequences, sequences), so_far.tokens + tokens
            )

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
class Failed:
    """The job has no result; its sequence is computed again, since its keys and values cannot be trusted."""

    error: TandemError


Prepare: TypeAlias = Callable[[SequenceOf[Job[PayloadT]]], None] | None
"""Called before a forward pass with the jobs that its rows complete; another thread may begin what the head needs."""


Head: TypeAlias = Callable[[SequenceOf[Job[PayloadT]], Tensor], SequenceOf[Done[ResultT] | Failed | Continue]]
"""Returns an outcome for each job whose rows are computed, in order: for all jobs of a step at once, so that the work
can be batched. Called on the engine's thread; a slow head delays every sequence.

The logits are [sum of their row_count, vocabulary_size] in the model's dtype, on its device; first job first, positions
ascending."""


def non_finite(length: int) -> Failed:
    """The failure of a job whose logits after `length` tokens are not finite."""
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
    """Record of one step."""

    sequence_count: int
    token_count: int
    row_count: int
    model_seconds: float
    """Time in the forward pass."""
    seconds: float
    """Time in all, the head included."""


@dataclass(frozen=True, slots=True)
class News:
    """News from the engine's thread for the event loop."""

    results: SequenceOf[tuple[Job[Any], object]] = ()
    """Jobs that have ended, each with a result or an exception."""
    freed: SequenceOf[Sequence] = ()
    """Released sequences that are out of use."""
    has_ended: bool = False
    """The thread ends; nothing more will be done."""
