"""Messages for many sequences: a few byte strings hold the values of all of them.

`struct` writes and reads each, so that a message for one sequence costs little, and one for sixty-four not much more.
Whatever reads columns raises a ProtocolError where their bytes or their lengths do not fit together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from struct import Struct, pack, unpack
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from tandem.errors import ProtocolError
from tandem.model.types import (
    DenseRow,
    DraftedOutcomes,
    Float32Array,
    FloatArray,
    Grammar,
    IntArray,
    Proposal,
    ProposeStep,
    SequenceOptions,
    StepCost,
    TargetOptions,
    TargetRow,
    TokenRow,
    Verification,
    VerifyStep,
)

PartT = TypeVar("PartT")

AnswerRecord: TypeAlias = tuple[int, int, int, StepCost | None]
"""Sequence, base length, number of rows or tokens, and the cost."""

_MAX_BYTES = 1 << 16
"""Size at which a message takes no further sequence: the limit on messages is meant for one sequence."""
_HEADER_BYTES = 32
"""Approximate size of a sequence in a message besides its tokens and rows."""
_OTHER_FIELDS = 16
"""Fields of a message that are no parts."""
_ANSWER = Struct("<3if2i")
"""Sequence, base length, number of rows or tokens, and the cost: seconds, sequences, tokens."""


MAX_PARTS = _MAX_BYTES // _HEADER_BYTES
"""Maximum parts of a message, each for one sequence: a message of ours takes no further one at 64 KiB."""
MAX_ROWS = 1 << 15
"""Maximum rows, or tokens that are not a prompt's, of a message: 64 KiB and one part more hold a few thousand."""
MAX_SUPPORT_IDS = 1 << 20
"""Maximum ids in all distributions of a message: sixteen times those of 128 tokens, with 512 each."""
MAX_IDS = 1 << 16
"""Maximum ids that come one by one in a message: biases, and ids that end a sequence."""


def check_count(count: int, what: str, most: int = MAX_PARTS) -> None:
    """Refuse so many values of a message before they are walked: the event loop would be held for seconds."""
    if count > most:
        raise ProtocolError(f"a message holds {count} {what}; it may hold at most {most}")


def check_fields(content: bytes) -> None:
    """Refuse a message of too many fields before it is parsed, since each may become an object.

    Whatever else is wrong with it is left to the parser.
    """
    if len(content) <= _MAX_BYTES:
        return
    place = 0
    for _ in range(MAX_PARTS + _OTHER_FIELDS):
        if place >= len(content):
            return
        tag, place = _varint(content, place)
        if tag < 8:
            return  # no field has the number 0
        match tag & 7:
            case 0:
                _, place = _varint(content, place)
            case 1:
                place += 8
            case 2:
                length, place = _varint(content, place)
                place += length
            case 5:
                place += 4
            case _:
                return
    raise ProtocolError(f"a message of {len(content)} bytes holds more than {MAX_PARTS} parts")


def _varint(content: bytes, place: int) -> tuple[int, int]:
    """A number in protobuf's form, and the place behind it."""
    value = shift = 0
    while place < len(content):
        byte = content[place]
        place += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80 or shift > 63:
            break
    return value, place


def parts_of(content: bytes) -> Iterator[bytes]:
    """A file in parts for messages, of which gRPC allows 4 MiB."""
    size = 1 << 20
    for start in range(0, len(content), size):
        yield content[start : start + size]


def pack_ints(values: Sequence[int]) -> bytes:
    """Little-endian signed 32-bit integers."""
    return pack(f"<{len(values)}i", *values)


def unpack_ints(data: bytes, what: str, count: int | None = None) -> tuple[int, ...]:
    """Read little-endian signed 32-bit integers."""
    _check_size(data, 4, what, count)
    return unpack(f"<{len(data) // 4}i", data)


def pack_ids(parts: Sequence[IntArray]) -> bytes:
    """Arrays of ids, one after the other, as 32-bit integers."""
    return np.concatenate(parts).astype("<i4").tobytes() if parts else b""


def unpack_ids(data: bytes, what: str, count: int | None = None) -> IntArray:
    """Read little-endian signed 32-bit integers as an array."""
    _check_size(data, 4, what, count)
    return np.frombuffer(data, "<i4").astype(np.int64)


def pack_floats(values: FloatArray | Float32Array) -> bytes:
    """An array as little-endian binary32."""
    return values.astype("<f4", copy=False).tobytes()


def unpack_floats(data: bytes, what: str, count: int | None = None) -> Float32Array:
    """An array over the message's own bytes, without a copy."""
    _check_size(data, 4, what, count)
    return np.frombuffer(data, "<f4")


def unpack_records(
    form: Struct, data: bytes, what: str, count: int | None = None, most: int = MAX_PARTS
) -> list[Any]:
    """Read records of one form, as tuples; at most so many where their count is not known."""
    _check_size(data, form.size, what, count)
    if count is None:
        check_count(len(data) // form.size, what, most)
    return list(form.iter_unpack(data))


def _check_size(data: bytes, width: int, what: str, count: int | None = None) -> None:
    size = len(data)
    if size % width or count not in (None, size // width):
        must = f"a multiple of {width}" if count is None else f"{width * count} for {count} values"
        raise ProtocolError(f"the column of {what} holds {size} bytes; it must hold {must}")


def bounds(sizes: Iterable[int], total: int, what: str) -> list[tuple[int, int]]:
    """Start and stop of each of several parts of a column."""
    found, start = [], 0
    for size in sizes:
        if size < 0:
            raise ProtocolError(f"the column of {what} has a part of {size} values; it must have at least 0")
        found.append((start, start + size))
        start += size
    if start != total:
        raise ProtocolError(f"the column of {what} has {total} values, and parts of {start} in all")
    return found


def split(data: bytes, sizes: Iterable[int], what: str, most: int | None = MAX_ROWS) -> list[tuple[int, ...]]:
    """Read integers as parts of these sizes; None: as many as the message holds, such as tokens of a prompt."""
    if most is not None:
        check_count(len(data) // 4, what, most)
    values = unpack_ints(data, what)
    return [values[start:stop] for start, stop in bounds(sizes, len(values), what)]


def pack_answers(answers: Iterable[tuple[int, Verification | Proposal | DraftedOutcomes, int]]) -> bytes:
    """The common part of answers as records; each comes with its sequence's number and its number of rows or tokens."""
    return b"".join(
        [
            _ANSWER.pack(number, answer.base_length, count, cost.seconds, cost.sequences, cost.tokens)
            if (cost := answer.cost)
            else _ANSWER.pack(number, answer.base_length, count, 0.0, 0, 0)
            for number, answer, count in answers
        ]
    )


def unpack_answers(data: bytes) -> Iterator[AnswerRecord]:
    """Read the common part of answers."""
    _check_size(data, _ANSWER.size, "answers")
    check_count(len(data) // _ANSWER.size, "answers")
    for number, base_length, count, *cost in _ANSWER.iter_unpack(data):
        yield number, base_length, count, _step_cost(*cost)


def _step_cost(seconds: float, sequences: int, tokens: int) -> StepCost | None:
    """The reported cost; None for impossible values, which would mislead a cost model."""
    # More than an hour is a mistake of the service
    if not 0.0 < seconds < 3600.0 or sequences < 1 or tokens < sequences:
        return None
    return StepCost(seconds, sequences, tokens)


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
    return size


def answer_count(data: bytes) -> int:
    """Number of a column's answers, before they are read."""
    return len(data) // _ANSWER.size


def _size_of_row(row: TargetRow) -> int:
    if isinstance(row, DenseRow):
        return 4 * row.logits.size
    return 16 if isinstance(row, TokenRow) else 20 + 4 * row.probs.size


class Outbox(Generic[PartT]):
    """Parts of messages that wait to be sent, each under its sequence's number on the stream, in order."""

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
        self._taken_bytes, taken = 0, []
        while self._parts and self._taken_bytes < _MAX_BYTES:
            sequence, part, size = self._parts.popleft()
            self._taken_bytes += size
            taken.append((sequence, part))
        return taken
