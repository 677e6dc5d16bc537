"""Messages for many sequences, column by column: a few byte strings hold the values of all of them.

Each byte string is written and read by one call, so that a message for sixty-four sequences costs little more than a
message for one.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from tandem.errors import ProtocolError
from tandem.types import Delta, Float32Array, FloatArray, IntArray, StepCost
from tandem.v1.types_pb2 import AnswerColumns, DeltaColumns

MAX_BYTES = 1 << 16
"""Bytes after which a message takes no further sequence, since the limit on messages is meant for one of them."""
HEADER_BYTES = 32
"""About what a sequence takes in a message besides its tokens and rows."""

_IS_BIG_ENDIAN = sys.byteorder == "big"
_MAX_STEP_SECONDS = 3600.0
"""A step cost beyond this is a mistake of the service."""

ItemT = TypeVar("ItemT")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(slots=True, eq=False)  # one for each answer: to freeze it would take three times as long
class Answered(Generic[T_co]):
    """An answer of a service to one sequence, or a complaint about it."""

    sequence: int
    answer: T_co
    size: int
    """Its share of the message in bytes."""


def ints_to_bytes(values: Sequence[int]) -> bytes:
    """Little-endian signed 32-bit integers."""
    return _bytes_of(array("i", values))


def numbers_to_bytes(values: Sequence[float]) -> bytes:
    """Little-endian binary32."""
    return _bytes_of(array("f", values))


# For a few numbers the standard library is several times faster than numpy, which takes microseconds to begin.
def _bytes_of(numbers: array[Any]) -> bytes:
    if _IS_BIG_ENDIAN:
        numbers.byteswap()
    return numbers.tobytes()


def _read(kind: Literal["i", "f"], data: bytes, count: int, what: str) -> list[Any]:
    if len(data) != 4 * count:
        raise ProtocolError(f"{what} holds {len(data)} bytes; it must hold {4 * count} for {count} values")
    numbers: array[Any] = array(kind, data)
    if _IS_BIG_ENDIAN:
        numbers.byteswap()
    return numbers.tolist()


def counts_to_bytes(values: Sequence[int]) -> bytes:
    """The same, but nothing where all are zero."""
    return ints_to_bytes(values) if any(values) else b""


def floats_to_bytes(values: FloatArray | Float32Array) -> bytes:
    """An array as little-endian binary32."""
    return values.astype("<f4", copy=False).tobytes()


def ids_to_bytes(parts: Sequence[IntArray]) -> bytes:
    """Arrays of ids, one after the other, as 32-bit integers."""
    return np.concatenate(parts).astype("<i4").tobytes() if parts else b""


def ints_from_bytes(data: bytes, count: int, what: str, *, may_lack: bool = False) -> list[int]:
    """Read little-endian signed 32-bit integers.

    Args:
        data: The bytes.
        count: Number of values.
        what: Name of the column.
        may_lack: No bytes mean zeros.

    Raises:
        ProtocolError: the bytes are not `count` of them.
    """
    if may_lack and not data:
        return [0] * count
    return _read("i", data, count, what)


def numbers_from_bytes(data: bytes, count: int, what: str) -> list[float]:
    """Read little-endian binary32.

    Raises:
        ProtocolError: the bytes are not `count` of them.
    """
    return _read("f", data, count, what)


def ids_from_bytes(data: bytes, count: int, what: str) -> IntArray:
    """Read little-endian signed 32-bit integers as an array, shape [count].

    Raises:
        ProtocolError: the bytes are not `count` of them.
    """
    if len(data) != 4 * count:
        raise ProtocolError(f"{what} holds {len(data)} bytes; it must hold {4 * count} for {count} values")
    return np.frombuffer(data, "<i4").astype(np.int64)


def floats_from_bytes(data: bytes, count: int, what: str) -> Float32Array:
    """Array of shape [count] over the message's own bytes, without a copy.

    Raises:
        ProtocolError: the bytes are not `count` floats.
    """
    if len(data) != 4 * count:
        raise ProtocolError(f"{what} holds {len(data)} bytes; it must hold {4 * count} for {count} values")
    return np.frombuffer(data, dtype="<f4")


def sizes_from_bytes(data: bytes, what: str, count: int | None = None) -> list[int]:
    """Read how long each of several parts is, none below 0.

    Args:
        data: The bytes.
        what: Name of the column.
        count: Number of parts; None: as many as there are.

    Raises:
        ProtocolError: the bytes are not so many numbers, or one is below 0.
    """
    sizes = ints_from_bytes(
        data, len(data) // 4 if count is None else count, what, may_lack=count is not None
    )
    if min(sizes, default=0) < 0:
        raise ProtocolError(f"{what} names a size of {min(sizes)}; it must be at least 0")
    return sizes


def split(values: Sequence[T], sizes: Iterable[int]) -> Iterator[Sequence[T]]:
    """Divide values into parts of these sizes."""
    start = 0
    for size in sizes:
        yield values[start : start + size]
        start += size


def bounds(sizes: Sequence[int], total: int, what: str) -> list[tuple[int, int]]:
    """Start and stop of each of several parts.

    Raises:
        ProtocolError: their sum is not the total.
    """
    stops = list(accumulate(sizes))
    if (stops[-1] if stops else 0) != total:
        raise ProtocolError(f"{what} has {total} values, and parts of {stops[-1] if stops else 0} in all")
    return list(zip([0, *stops], stops, strict=False))


def deltas_to_proto(into: DeltaColumns, changes: Iterable[tuple[int, Delta]]) -> None:
    """Write changes of sequences, each with its sequence's number."""
    sequences, deltas = zip(*changes, strict=True)
    into.sequences = ints_to_bytes(sequences)
    into.base_lengths = ints_to_bytes([delta.base_length for delta in deltas])
    into.token_counts = ints_to_bytes([len(delta.token_ids) for delta in deltas])
    into.token_ids = b"".join([ints_to_bytes(delta.token_ids) for delta in deltas])


def deltas_from_proto(message: DeltaColumns) -> list[tuple[int, Delta]]:
    """Read changes of sequences, each with its sequence's number.

    Raises:
        ProtocolError: the columns do not fit together.
    """
    count = len(message.sequences) // 4
    sequences = ints_from_bytes(message.sequences, count, "the column of sequences")
    base_lengths = ints_from_bytes(message.base_lengths, count, "the column of base lengths")
    sizes = sizes_from_bytes(message.token_counts, "the column of token counts", count)
    token_ids = ints_from_bytes(message.token_ids, sum(sizes), "the column of token ids")
    parts = split(token_ids, sizes)
    return list(zip(sequences, map(Delta, base_lengths, parts), strict=True))


def heads_to_proto(into: AnswerColumns, heads: Iterable[tuple[int, int, StepCost | None]]) -> None:
    """Write what every answer says: the sequence's number, the base length and the cost."""
    sequences, base_lengths, costs = zip(*heads, strict=True)
    into.sequences = ints_to_bytes(sequences)
    into.base_lengths = ints_to_bytes(base_lengths)
    if any(costs):
        into.cost_seconds = numbers_to_bytes([cost.seconds if cost else 0.0 for cost in costs])
        into.cost_sequence_counts = ints_to_bytes([cost.sequences if cost else 0 for cost in costs])
        into.cost_token_counts = ints_to_bytes([cost.tokens if cost else 0 for cost in costs])


def heads_from_proto(message: AnswerColumns) -> list[tuple[int, int, StepCost | None]]:
    """Read what every answer says: the sequence's number, the base length and the cost.

    Raises:
        ProtocolError: the columns do not have the same length.
    """
    count = len(message.sequences) // 4
    sequences = ints_from_bytes(message.sequences, count, "the column of sequences")
    base_lengths = ints_from_bytes(message.base_lengths, count, "the column of base lengths")
    if not message.cost_seconds:
        return list(zip(sequences, base_lengths, repeat(None), strict=False))
    columns = zip(
        numbers_from_bytes(message.cost_seconds, count, "the column of seconds"),
        ints_from_bytes(message.cost_sequence_counts, count, "the column of sequence counts"),
        ints_from_bytes(message.cost_token_counts, count, "the column of costs' token counts"),
        strict=True,
    )
    costs = list(columns)
    known = {cost: _step_cost(*cost) for cost in set(costs)}  # sequences that share a step have one cost
    return list(zip(sequences, base_lengths, [known[cost] for cost in costs], strict=True))


def _step_cost(seconds: float, sequences: int, tokens: int) -> StepCost | None:
    """The cost that a service reports; None for impossible values, which would mislead a cost model."""
    if not 0.0 < seconds < _MAX_STEP_SECONDS or sequences < 1 or tokens < sequences:
        return None
    return StepCost(seconds, sequences, tokens)


def take_message(outbox: list[tuple[int, ItemT, int]]) -> list[tuple[int, ItemT, int]]:
    """Take the first items out of the outbox, each a sequence, what is said of it, and how many bytes it takes.

    As many as a message takes, at least one.
    """
    total = count = 0
    for _, _, size in outbox:
        total, count = total + size, count + 1
        if total >= MAX_BYTES:
            break
    taken = outbox[:count]
    del outbox[:count]
    return taken
