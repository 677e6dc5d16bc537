"""What is asked of an engine, and what decides on the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from tandem.engine.segment import Segment
from tandem.engine.sequence import Sequence
from tandem.errors import InvalidRequestError
from tandem.types import Delta

PayloadT = TypeVar("PayloadT")
ResultT = TypeVar("ResultT")


class Job(Generic[PayloadT]):
    """One request: a delta to apply and rows wanted of what then stands at the end of the sequence.

    `row_count` 0 only computes keys and values; the head is then not asked and the result is None.
    """

    __slots__ = ("delta", "future", "is_cancelled", "payload", "row_count", "sequence")

    def __init__(self, sequence: Sequence, delta: Delta, row_count: int, payload: PayloadT) -> None:
        if row_count < 0:
            raise InvalidRequestError(f"The number of rows is {row_count} and must not be negative.")
        self.sequence = sequence
        self.delta = delta
        self.row_count = row_count
        """Rows for the last `row_count` positions. 1 after the head said `Continue`."""
        self.payload = payload
        """Whatever the head needs to know; the engine does not look at it."""
        self.future: asyncio.Future[object] | None = None
        """Set by the engine when the job is handed in."""
        self.is_cancelled = False
        """Nobody waits for the result any more."""

    @property
    def is_abandoned(self) -> bool:
        """Whether the engine is to drop the job before its next step."""
        return self.is_cancelled or self.sequence.is_released


@dataclass(frozen=True, slots=True)
class Done(Generic[ResultT]):
    """The job is finished."""

    result: ResultT


@dataclass(frozen=True, slots=True)
class Continue:
    """Append a token to the job's sequence and ask again with the row that follows it."""

    token_id: int


class Head(Protocol[PayloadT, ResultT]):
    """Turns logits into results, for all jobs of a step at once, so that the work can be batched.

    Called on the engine's thread; a slow head delays every sequence.
    """

    def __call__(
        self, ready: SequenceOf[Job[PayloadT]], logits: Tensor
    ) -> SequenceOf[Done[ResultT] | Continue]:
        """Decides what comes of each job.

        Args:
            ready: jobs whose rows are computed.
            logits: [sum of their row_count, vocabulary_size] in the model's dtype, on its device; first job first,
                positions ascending.

        Returns:
            One outcome for each job, in order.
        """
        ...


DoneT = TypeVar("DoneT", covariant=True)


class RunAhead(Protocol[PayloadT, DoneT]):
    """Does at once what the head would ask for step by step with `Continue`."""

    def run(self, segments: SequenceOf[Segment], jobs: SequenceOf[Job[PayloadT]]) -> SequenceOf[DoneT] | None:
        """Finish the jobs, or leave them as they are to single steps. Called on the engine's thread.

        Args:
            segments: what the next step would run.
            jobs: whose they are.

        Returns:
            One result for each job, its sequence being as single steps would have left it; None when it cannot.
        """
        ...
