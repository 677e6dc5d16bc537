"""Bounds of messages: what repeats in them is counted before it is walked.

A peer's message may hold millions of values. While they are walked, everybody else's messages wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from google.protobuf.message import Message

from tandem.errors import ProtocolError

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
    "supports.token_ids": MAX_SUPPORT_VALUES,
    "distributions.token_ids": MAX_SUPPORT_VALUES,
    "distributions.probabilities": MAX_SUPPORT_VALUES,
    "drawn_from.token_ids": MAX_SUPPORT_VALUES,
    "drawn_from.probabilities": MAX_SUPPORT_VALUES,
    "rows.probabilities": MAX_SUPPORT_VALUES,
    "statistics.ranks": MAX_SUPPORT_VALUES,
    "statistics.logits": MAX_SUPPORT_VALUES,
}
"""By the end of the way to a field."""
_OTHER_FIELDS = 16
"""Fields of a message that are no parts."""


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


def check_bytes(content: bytes) -> None:
    """Refuse a message of too many fields before it is parsed, since each may become an object.

    Whatever else is wrong with it is left to the parser.
    """
    if len(content) <= LARGE_BYTES:
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
