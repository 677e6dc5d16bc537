"""Messages that carry parts for several sequences."""

from __future__ import annotations

from tandem.v1.types_pb2 import SequencePart

MAX_BYTES = 1 << 16
"""Bytes after which a message takes no further part, since the limit on messages is meant for one part."""


def take_message(outbox: list[SequencePart]) -> list[SequencePart]:
    """Take the first parts out of the outbox: as many as a message takes, at least one."""
    size = count = 0
    for part in outbox:
        size, count = size + len(part.message), count + 1
        if size >= MAX_BYTES:
            break
    taken = outbox[:count]
    del outbox[:count]
    return taken
