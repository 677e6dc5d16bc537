"""Lets the readers of many streams go on a few at a time, so that the services' answers are read in between."""

from __future__ import annotations

import asyncio
from collections import deque

from tandem.types import Chunk

CHUNKS_PER_TURN = 16
"""Chunks that one turn of the event loop hands over. A message may end the rounds of hundreds of requests at once, and
to write a chunk takes some 30 us: without a limit the next answer would wait for all of them."""

Reader = asyncio.Future["Chunk | None"]
"""The wait of a reader for its next chunk."""


class ChunkPacer:
    """Hands chunks to the readers that wait for them, in order, from the next turn of the loop on.

    The turn in which a round ends belongs to the question of the next round.
    """

    def __init__(self, chunks_per_turn: int = CHUNKS_PER_TURN) -> None:
        """Begin without chunks.

        Args:
            chunks_per_turn: Readers that go on in one turn of the loop.
        """
        self._chunks_per_turn = chunks_per_turn
        self._waiting: deque[tuple[Reader, Chunk]] = deque()

    def hand_over(self, reader: Reader, chunk: Chunk) -> None:
        """Let a reader have its chunk soon."""
        self._waiting.append((reader, chunk))
        if len(self._waiting) == 1:
            reader.get_loop().call_soon(self._next)

    def _next(self) -> None:
        waiting = self._waiting
        reader = waiting[0][0]
        for _ in range(min(self._chunks_per_turn, len(waiting))):
            reader, chunk = waiting.popleft()
            if not reader.done():  # its call was cancelled
                reader.set_result(chunk)
        if waiting:
            reader.get_loop().call_soon(self._next)
