"""Messages that carry parts for several sequences."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tandem.v1.types_pb2 import SequencePart

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
