"""Bytes that the connections of the HTTP side hold together, bounded whatever each of them does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from coordinator.settings.coordinator import HttpOptions
from tandem.errors import CapacityError

FREE_BYTES = 64 << 10
"""Uncounted bytes of each connection, so that small requests and answers pass when large ones fill the rest."""
_RETRY_SECONDS = 1.0


class HeldBytes:
    """The bytes of one kind, such as request bodies, that are held at once over all connections."""

    def __init__(self, max_bytes: int, advice: str) -> None:
        """
        Args:
            max_bytes: Maximum bytes, besides the free ones of each connection.
            advice: The sentence of a refusal, with `{max_bytes}` for the maximum.
        """
        self._max_bytes = max_bytes
        self._advice = advice
        self.held = 0
        """Bytes that are held now, without the free ones."""

    @contextmanager
    def share(self) -> Iterator[Share]:
        """One connection's part; it is given back at the end of the block."""
        share = Share(self)
        try:
            yield share
        finally:
            share.clear()

    def take(self, count: int) -> None:
        """Count more bytes, or fewer.

        Raises:
            CapacityError: there is no room for them. They are not counted.
        """
        if count > 0 and self.held + count > self._max_bytes:
            raise CapacityError(self._advice.format(max_bytes=self._max_bytes), _RETRY_SECONDS)
        self.held += count


class Share:
    """The bytes that one connection holds."""

    def __init__(self, of: HeldBytes) -> None:
        self._of = of
        self._bytes = 0

    def add(self, count: int) -> None:
        """Count more bytes.

        Raises:
            CapacityError: there is no room for them. All are given back at once: the request takes a while to end, and
                every other one that grows meanwhile would be refused as well.
        """
        more = max(self._bytes + count - FREE_BYTES, 0) - max(self._bytes - FREE_BYTES, 0)
        try:
            self._of.take(more)
        except CapacityError:
            self.clear()
            raise
        self._bytes += count

    def clear(self) -> None:
        """Give all of them back."""
        self._of.take(-max(self._bytes - FREE_BYTES, 0))
        self._bytes = 0


@dataclass(frozen=True, slots=True)
class HttpMemory:
    """Bounds of the HTTP side's memory."""

    max_body_bytes: int
    """Maximum size of one request's body."""
    bodies: HeldBytes
    """Bodies that are not read and parsed yet."""
    answers: HeldBytes
    """Answers that are not streamed, until they are sent."""

    @classmethod
    def of(cls, settings: HttpOptions) -> HttpMemory:
        """The bounds that the options set."""
        bodies = HeldBytes(
            settings.http_max_held_body_bytes,
            "large bodies that have not arrived completely hold {max_bytes} bytes, which is the maximum; try again",
        )
        answers = HeldBytes(
            settings.http_max_held_answer_bytes,
            "large answers that are not streamed hold {max_bytes} bytes, which is the maximum; set stream, ask for "
            "fewer completions, tokens or logprobs, or try again",
        )
        return cls(settings.http_max_body_bytes, bodies, answers)
