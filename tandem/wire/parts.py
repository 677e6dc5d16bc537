"""What is said of several sequences in one message."""

from __future__ import annotations

from tandem.v1.types_pb2 import SequencePart

MOST_BYTES = 1 << 16
"""A message takes no further part once it has so many: the limit of a message is meant for one part."""


def take_message(outbox: list[SequencePart]) -> list[SequencePart]:
    """The first parts, as many as a message takes and at least one; they are no longer in the outbox."""
    size = count = 0
    for part in outbox:
        size, count = size + len(part.message), count + 1
        if size >= MOST_BYTES:
            break
    taken = outbox[:count]
    del outbox[:count]
    return taken
