"""Bounds of messages: what repeats in them is counted before it is walked.

A peer's message may hold millions of values. While they are walked, everybody else's messages wait.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import TypeVar, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from tandem.errors import ProtocolError

MessageT = TypeVar("MessageT", bound=Message)

LARGE_BYTES = 1 << 16
"""Size from which a message is counted, and at which a message of ours takes no further part: the limit on messages is
meant for one sequence."""
MAX_PARTS = 2048
"""Maximum parts of a message, each for one sequence: one of ours takes no further part at 64 KiB."""
MAX_VALUES = 1 << 15
"""Maximum values of a field, in all parts of a message, where `_LIMITS` does not say otherwise. 64 KiB and one part
more hold a few thousand."""
MAX_IDS = 1 << 16
"""Maximum ids that come one by one in a message: biases, and ids that end a sequence."""
MAX_SUPPORT_VALUES = 1 << 20
"""Maximum ids in all distributions of a message: sixteen times those of 128 tokens, with 512 each."""
MAX_DELTA_IDS = 1 << 20
"""Maximum tokens of all deltas: the longest prompts that any model reads."""

_LIMITS = {
    "parts": MAX_PARTS,
    "steps": MAX_PARTS,
    "eos_token_ids": MAX_PARTS,
    "committed.token_ids": MAX_DELTA_IDS,
    "end_token_ids": MAX_IDS,
    "logit_adjustments.biases": MAX_IDS,
    "logit_adjustments.suppressed_token_ids": MAX_IDS,
    "logit_adjustments.allowed_token_ids": MAX_IDS,
    "forbidden_sequences.token_ids": MAX_IDS,
    "supports.token_ids": MAX_SUPPORT_VALUES,
    "distributions.token_ids": MAX_SUPPORT_VALUES,
    "distributions.probabilities": MAX_SUPPORT_VALUES,
    "drawn_from.token_ids": MAX_SUPPORT_VALUES,
    "drawn_from.probabilities": MAX_SUPPORT_VALUES,
    "rows.probabilities": MAX_SUPPORT_VALUES,
    "statistics.ranks": MAX_SUPPORT_VALUES,
    "statistics.logits": MAX_SUPPORT_VALUES,
    "logprobs.top_token_ids": MAX_SUPPORT_VALUES,
    "logprobs.top_logprobs": MAX_SUPPORT_VALUES,
    "logprobs.token_logprobs": MAX_SUPPORT_VALUES,
    "logprobs.raw_logprobs": MAX_SUPPORT_VALUES,
    "logprobs.processed_logprobs": MAX_SUPPORT_VALUES,
}
"""By the end of the way to a field."""
WALKED_BYTES = 1 << 20
"""Size from which a message's fields are counted before it is parsed. Of the smallest fields, parsing makes 2 million
objects of 4 MiB, in 77 ms and 190 MiB of memory; a coordinator takes messages of tens of megabytes, for dense rows."""
MAX_FIELDS = 1 << 15
"""Maximum fields of such a message, each counted as often as it occurs. Only dense rows and long lists of numbers are
so large, and each of those is one field. Counting so many takes 20 ms."""
_LENGTH_DELIMITED = 2
"""Wire type of strings, bytes, messages and lists of numbers."""


def check_message(message: Message) -> None:
    """Refuse a message that holds more of anything than a peer has to say.

    A small one holds few values of any kind, and is not walked twice.
    """
    if message.ByteSize() <= LARGE_BYTES:
        return
    counts: Counter[str] = Counter()
    for path, count in _count_repeated(message, ""):
        counts[path] += count
        limit = _limit(path)
        if counts[path] > limit:
            raise ProtocolError(
                f"a message holds {counts[path]} {path.lstrip('.')}; it may hold at most {limit}"
            )


def _limit(path: str) -> int:
    for end, limit in _LIMITS.items():
        if path.endswith("." + end):
            return limit
    return MAX_VALUES


def _count_repeated(message: Message, path: str) -> Iterator[tuple[str, int]]:
    """The way to each field that repeats and its number of values, before these are walked."""
    for field, value in message.ListFields():
        own = f"{path}.{field.name}"
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if field.is_repeated:
            yield own, len(value)
        if field.message_type is None or is_map:
            continue
        for part in value if field.is_repeated else (value,):
            yield from _count_repeated(part, own)


def read_message(kind: type[MessageT], content: bytes) -> MessageT:
    """Parse a message. A large one of too many fields is refused unparsed."""
    check_bytes(content, cast(Descriptor, kind.DESCRIPTOR))
    return kind.FromString(content)


def check_bytes(content: bytes, described: Descriptor) -> None:
    """Refuse a large message of too many fields, however deep, before the parser makes an object of each.

    Whatever else is wrong with it is left to the parser.
    """
    if len(content) <= WALKED_BYTES:
        return
    if _has_more_fields(content, described):
        raise ProtocolError(f"a message of {len(content)} bytes holds more than {MAX_FIELDS} fields")


def _has_more_fields(content: bytes, described: Descriptor) -> bool:
    """True if a message has more than `MAX_FIELDS`, as far as its bytes are some that the parser takes."""
    count = 0
    unread = [(0, len(content), described)]
    while unread:
        place, end, described = unread.pop()
        types = _message_types(described)
        while place < end:
            count += 1
            if count > MAX_FIELDS:
                return True
            tag, place = _varint(content, place)
            wire_type = tag & 7
            value = _value(content, place, wire_type)
            if tag < 8 or value is None:
                break  # the parser refuses it, behind the fields before
            begin, place = value
            part = types.get(tag >> 3)
            if part is not None and wire_type == _LENGTH_DELIMITED:
                unread.append((begin, min(place, end), part))
    return False


def _value(content: bytes, place: int, wire_type: int) -> tuple[int, int] | None:
    """Where a field's value begins and ends; None for a type that protobuf does not have."""
    match wire_type:
        case 0:
            return place, _varint(content, place)[1]
        case 1:
            return place, place + 8
        case 2:
            length, begin = _varint(content, place)
            return begin, begin + length
        case 3 | 4:
            return place, place  # the bounds of a group, whose fields are counted like any others
        case 5:
            return place, place + 4
        case _:
            return None


@functools.cache
def _message_types(described: Descriptor) -> dict[int, Descriptor]:
    """The types of the fields that are messages, by number."""
    return {
        field.number: field.message_type
        for field in described.fields
        if field.message_type is not None and not field.message_type.GetOptions().map_entry
    }


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
