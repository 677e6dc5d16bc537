"""Answers to many sequences column by column: a few byte strings for all of them, each read by one numpy call.

What one sequence says is a message of its own until it is sent. The columns of such messages are joined byte by byte,
so that a message for sixty-four sequences has the form of a message for one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

import numpy as np
from google.protobuf.message import Message

from tandem.errors import ProtocolError
from tandem.types import StepCost
from tandem.v1.types_pb2 import AnswerColumns, SequencePart
from tandem.v1.types_pb2 import StepCost as StepCostMessage
from tandem.wire.common import floats_from_bytes, step_cost

MessageT = TypeVar("MessageT", bound=Message)
T = TypeVar("T")


@dataclass(slots=True, eq=False)  # one for each answer: to freeze it would take three times as long
class Head:
    """The fields of every answer, whatever its kind."""

    sequence: int
    base_length: int
    cost: StepCost | None


@dataclass(slots=True, eq=False)  # one for each answer: to freeze it would take three times as long
class Arrived(Generic[T]):
    """An answer that was read out of a message for several sequences."""

    sequence: int
    answer: T
    size: int
    """Its share of the message in bytes."""


def joined(messages: Sequence[MessageT], into: MessageT) -> MessageT:
    """Join the columns of several messages of a type, all of whose fields are byte strings.

    Args:
        messages: The messages, in order.
        into: An empty message of the same type, which is filled and returned.
    """
    for field in into.DESCRIPTOR.fields:
        if content := b"".join([getattr(message, field.name) for message in messages]):
            setattr(into, field.name, content)
    return into


class Answer(Protocol):
    """The fields of every answer of a service."""

    @property
    def base_length(self) -> int:
        """See the messages."""

    @property
    def cost(self) -> StepCostMessage:
        """All zeros where it was not measured."""


def heads_to_proto(answers: Iterable[tuple[int, Answer]]) -> AnswerColumns:
    """Columns of what every answer says.

    Args:
        answers: Pairs of a sequence's number and its answer, at least one.
    """
    sequences, messages = zip(*answers, strict=True)
    costs = [message.cost for message in messages]
    return AnswerColumns(
        sequences=np.array(sequences, "<i8").tobytes(),
        base_lengths=ints_to_bytes([message.base_length for message in messages]),
        cost_seconds=np.array([cost.seconds for cost in costs], "<f4").tobytes(),
        cost_sequence_counts=ints_to_bytes([cost.sequence_count for cost in costs]),
        cost_token_counts=ints_to_bytes([cost.token_count for cost in costs]),
    )


def heads_from_proto(message: AnswerColumns) -> list[Head]:
    """Read whose answers the columns are.

    Raises:
        ProtocolError: the columns do not have the same length.
    """
    count = len(message.sequences) // 8
    if len(message.sequences) != 8 * count:
        raise ProtocolError(
            f"the column of sequences holds {len(message.sequences)} bytes; it must hold 8 for each sequence"
        )
    seconds = floats_from_bytes(message.cost_seconds, count, "the column of seconds").tolist()
    sequence_counts = ints_from_bytes(message.cost_sequence_counts, count, "the column of sequence counts")
    token_counts = ints_from_bytes(message.cost_token_counts, count, "the column of token counts")
    costs = list(zip(seconds, sequence_counts, token_counts, strict=True))
    read = {cost: step_cost(*cost) for cost in set(costs)}  # sequences that share a step have one cost
    return [
        Head(sequence, base_length, read[cost])
        for sequence, base_length, cost in zip(
            np.frombuffer(message.sequences, "<i8").tolist(),
            ints_from_bytes(message.base_lengths, count, "the column of base lengths"),
            costs,
            strict=True,
        )
    ]


def ints_to_bytes(values: Sequence[int]) -> bytes:
    """Little-endian signed 32-bit integers."""
    return np.array(values, "<i4").tobytes()


def ints_from_bytes(data: bytes, count: int, what: str) -> list[int]:
    """Read little-endian signed 32-bit integers.

    Raises:
        ProtocolError: the bytes are not `count` of them.
    """
    if len(data) != 4 * count:
        raise ProtocolError(f"{what} holds {len(data)} bytes; it must hold {4 * count} for {count} values")
    numbers: list[int] = np.frombuffer(data, "<i4").tolist()
    return numbers


def sizes_from_bytes(data: bytes, what: str) -> list[int]:
    """Read how long each of several parts is: as many numbers as there are, none below 0.

    Raises:
        ProtocolError: the bytes are no whole numbers, or one is below 0.
    """
    sizes = ints_from_bytes(data, len(data) // 4, what)
    if min(sizes, default=0) < 0:
        raise ProtocolError(f"{what} names a size of {min(sizes)}; it must be at least 0")
    return sizes


def parts(
    heads: Sequence[Head],
    counts_data: bytes,
    total: int,
    size: int,
    part: Callable[[Head, int, int], T],
) -> Iterator[Arrived[T]]:
    """Divide columns among their sequences.

    Args:
        heads: The sequences.
        counts_data: How many values each of them has: the column of counts.
        total: How many there are.
        size: Bytes of the message.
        part: Makes the answer of the values from a start to before a stop.

    Raises:
        ProtocolError: the counts are not as many as the sequences, or their sum is another number.
    """
    counts = sizes_from_bytes(counts_data, "the column of counts")
    if len(counts) != len(heads) or sum(counts) != total:
        raise ProtocolError(
            f"columns of {total} values came with counts of {counts} for {len(heads)} sequences; there must be one "
            "count for each sequence, and their sum must be the number of values"
        )
    share = size // max(len(heads), 1)
    for head, stop, count in zip(heads, accumulate(counts), counts, strict=True):
        yield Arrived(head.sequence, part(head, stop - count, stop), share)


MAX_BYTES = 1 << 16
"""Bytes after which a message takes no further part, since the limit on messages is meant for one part."""

_MIN_JOINED = 3
"""Columns of fewer sequences are not joined: a block takes some 10 us to read, whatever it holds."""


class Serialized(Protocol):
    """An answer."""

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        """Its bytes."""


AnswerT = TypeVar("AnswerT", bound=Serialized)
PartT = TypeVar("PartT")


@dataclass(frozen=True, slots=True)
class ColumnPart(Generic[AnswerT]):
    """An answer with columns, which are joined with those of other sequences when they are sent."""

    sequence: int
    answer: AnswerT
    size: int
    """In bytes."""


def size_of(part: SequencePart | ColumnPart[AnswerT]) -> int:
    """How many bytes a part adds to a message, without its number."""
    return part.size if isinstance(part, ColumnPart) else len(part.message)


def grouped(
    answers: Iterable[SequencePart | ColumnPart[AnswerT]], form: Callable[[AnswerT], Hashable]
) -> tuple[list[SequencePart], list[list[ColumnPart[AnswerT]]]]:
    """Divide what goes into a message into parts of their own and groups of columns to join.

    Args:
        answers: In order.
        form: Equal for answers whose columns can be joined.

    Returns:
        The parts, and groups of answers of one form each. An answer precedes its sequence's end, whichever way it goes.
    """
    parts: list[SequencePart] = []
    groups: dict[Hashable, list[ColumnPart[AnswerT]]] = {}
    for each in answers:
        if isinstance(each, ColumnPart):
            groups.setdefault(form(each.answer), []).append(each)
        else:
            parts.append(each)
    alone = [part for group in groups.values() if len(group) < _MIN_JOINED for part in group]
    own = [SequencePart(sequence=part.sequence, message=part.answer.SerializeToString()) for part in alone]
    return own + parts, [group for group in groups.values() if len(group) >= _MIN_JOINED]


def take_message(outbox: list[PartT], size: Callable[[PartT], int]) -> list[PartT]:
    """Take the first parts out of the outbox: as many as a message takes, at least one."""
    total = count = 0
    for part in outbox:
        total, count = total + size(part), count + 1
        if total >= MAX_BYTES:
            break
    taken = outbox[:count]
    del outbox[:count]
    return taken
