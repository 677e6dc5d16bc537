"""JSON of any size, rendered as it is gathered and sent in parts: no step of it holds the interpreter for long."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

PART_BYTES = 32 << 10
"""A part is sent once it has so many bytes."""


class JsonList:
    """A list that is kept as the bytes of its JSON."""

    def __init__(self) -> None:
        self._text = bytearray()

    def __len__(self) -> int:
        """Its bytes, brackets included."""
        return len(self._text) + 2

    def extend(self, items: Iterable[object]) -> int:
        """Append items; the number of bytes that they take."""
        before = len(self._text)
        for item in items:
            if self._text:
                self._text += b","
            self._text += rendered(item)
        return len(self._text) - before

    def parts(self) -> Iterator[bytes]:
        """Its JSON."""
        yield b"["
        for start in range(0, len(self._text), PART_BYTES):
            yield bytes(self._text[start : start + PART_BYTES])
        yield b"]"


def rendered(value: object) -> bytes:
    """The JSON of a small value."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def flattened(value: object) -> Iterator[bytes | JsonList]:
    """The JSON of a value that holds lists of rendered items, in order."""
    if isinstance(value, JsonList):
        yield value
    elif isinstance(value, dict):
        yield b"{"
        for number, (name, item) in enumerate(value.items()):
            yield (b"," if number else b"") + rendered(name) + b":"
            yield from flattened(item)
        yield b"}"
    elif isinstance(value, list):
        yield b"["
        for number, item in enumerate(value):
            if number:
                yield b","
            yield from flattened(item)
        yield b"]"
    else:
        yield rendered(value)


def parts(pieces: Iterable[bytes | JsonList]) -> Iterator[bytes]:
    """The same bytes in parts of about `PART_BYTES`."""
    waiting = bytearray()
    for piece in pieces:
        for part in piece.parts() if isinstance(piece, JsonList) else (piece,):
            waiting += part
            if len(waiting) >= PART_BYTES:
                yield bytes(waiting)
                waiting.clear()
    if waiting:
        yield bytes(waiting)
