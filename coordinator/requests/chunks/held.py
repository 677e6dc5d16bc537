"""Joins chunks of several rounds into one, for clients that want fewer and larger pieces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from tandem.types import Chunk


class HeldChunks:
    """Chunks that wait until they have enough tokens together (vLLM's `stream_interval`).

    The first tokens of a completion and its end never wait.
    """

    def __init__(self, stream_interval: int) -> None:
        """Begin without chunks.

        Args:
            stream_interval: Tokens that are enough.
        """
        self._interval = stream_interval
        self._chunks: list[Chunk] = []
        self._tokens = 0
        self._has_begun = False
        """True once a chunk with tokens was added."""

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def add(self, chunk: Chunk) -> bool:
        """Add a chunk. Returns True if what is held is to be taken now."""
        self._chunks.append(chunk)
        self._tokens += len(chunk.token_ids)
        is_first = not self._has_begun
        self._has_begun = self._has_begun or bool(chunk.token_ids)
        return is_first or self._tokens >= self._interval or chunk.summary is not None

    def take(self) -> Chunk:
        """All of it as one chunk, after which nothing is held."""
        chunks, self._chunks, self._tokens = self._chunks, [], 0
        return chunks[0] if len(chunks) == 1 else joined(chunks)


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """One chunk with the text and the tokens of all.

    Args:
        chunks: Successive chunks of a completion, at least one. Only the last may have a summary.
    """
    return Chunk(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(chain.from_iterable(chunk.token_ids for chunk in chunks)),
        drafted=tuple(chain.from_iterable(chunk.drafted for chunk in chunks)),
        text_lengths=tuple(chain.from_iterable(chunk.text_lengths for chunk in chunks)),
        summary=chunks[-1].summary,
        proposed=sum(chunk.proposed for chunk in chunks),
        logprobs=tuple(chain.from_iterable(chunk.logprobs for chunk in chunks)),
        drafted_ahead=any(chunk.drafted_ahead for chunk in chunks),
    )
