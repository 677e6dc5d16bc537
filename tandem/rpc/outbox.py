"""Queue of the parts that wait for a stream, and the cut into messages."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from tandem.model.types import (
    DenseRow,
    DraftedOutcomes,
    Grammar,
    HiddenStates,
    Proposal,
    ProposeStep,
    RowLogprobs,
    SequenceOptions,
    TargetOptions,
    TargetRow,
    TokenRow,
    Verification,
    VerifyStep,
)
from tandem.wire.bounds import LARGE_BYTES, MAX_PARTS
from tandem.wire.features import PassedStates

PartT = TypeVar("PartT")

_HEADER_BYTES = LARGE_BYTES // MAX_PARTS
"""Approximate size of a sequence in a message besides its tokens and rows."""


def size_of(part: object) -> int:
    """About how many bytes a request or an answer for one sequence adds to a message."""
    size = _HEADER_BYTES
    match part:
        case VerifyStep():
            size += 4 * (len(part.delta.token_ids) + sum(map(len, part.supports)))
        case ProposeStep():
            size += 4 * len(part.delta.token_ids)
        case Proposal() | DraftedOutcomes():
            size += 12 * len(part.token_ids) + 8 * sum([len(each.token_ids) for each in part.distributions])
        case Verification():
            size += sum(map(_size_of_row, part.rows))
            size += sum(map(_size_of_logprobs, part.logprobs))
        case HiddenStates():
            size += len(part.data)
        case PassedStates():
            size += part.size
        case SequenceOptions():
            size += _size_of_open(part)
    return size


def _size_of_open(options: SequenceOptions) -> int:
    size = 0
    if isinstance(options.grammar, Grammar):
        size += len(options.grammar.source.encode("utf-8", "surrogatepass"))
    if isinstance(options, TargetOptions):
        adjustments = options.adjustments
        size += 16 * len(adjustments.biases)
        size += 4 * (len(options.end_token_ids) + len(adjustments.suppressed_token_ids))
        size += 4 * len(adjustments.allowed_token_ids)
        size += 4 * sum(2 + len(sequence) for sequence in adjustments.forbidden_sequences)
    return size


def _size_of_logprobs(row: RowLogprobs) -> int:
    own = len(row.token_logprobs) + len(row.raw_logprobs) + len(row.processed_logprobs)
    return 12 * len(row.top_token_ids) + 8 * own


def _size_of_row(row: TargetRow) -> int:
    if isinstance(row, DenseRow):
        return 4 * row.logits.size
    return 16 if isinstance(row, TokenRow) else 20 + 4 * row.probs.size


class Outbox(Generic[PartT]):
    """Parts that wait, each with the number of its sequence, in order."""

    def __init__(self) -> None:
        self._parts: deque[tuple[int, PartT, int]] = deque()
        self.waiting_bytes = 0
        """About the size of what waits, including the message that was taken last."""
        self._taken_bytes = 0

    def put(self, sequence: int, part: PartT) -> None:
        size = size_of(part)
        self._parts.append((sequence, part, size))
        self.waiting_bytes += size

    def take(self) -> list[tuple[int, PartT]]:
        """As many of the first parts as go into a message, at least one; empty where there are none.

        The message that was taken before has been sent.
        """
        self.waiting_bytes -= self._taken_bytes
        self._taken_bytes = 0
        taken: list[tuple[int, PartT]] = []
        while self._parts and self._taken_bytes < LARGE_BYTES:
            sequence, part, size = self._parts.popleft()
            self._taken_bytes += size
            taken.append((sequence, part))
        return taken
