"""Hands chunks from the task that runs a request to the reader that streams them to the client."""

from __future__ import annotations

import asyncio

from tandem.types import Chunk

_TURNS = 2
"""Turns of the event loop that a woken reader lets pass: in the first, the next round asks its draft in a task of its
own; in the second, the stream writes that message together with those of other requests."""


class ChunkQueue:
    """Holds one chunk for one reader.

    Writing a chunk takes as long as a step of a small draft, so the next round goes first: while the reader waits,
    `put` returns at once, and the next round's first message is written before the chunk. A reader that stops delays
    the chunk after the one it has, and nothing else.
    """

    def __init__(self) -> None:
        self._chunk: asyncio.Future[Chunk | None] | None = None
        """Set while the reader waits."""
        self._pending: Chunk | None = None
        """A chunk that the reader has not taken yet."""
        self._reader_is_back: asyncio.Future[None] | None = None
        """Set while the writer waits."""
        self._is_closed = False

    async def put(self, chunk: Chunk) -> None:
        """Hand over a chunk. Returns once the reader has it; after the last chunk, once the reader asks for more."""
        if self._chunk is not None:
            _resolve(self._chunk, chunk)
            self._chunk = None
            if chunk.summary is not None:
                await self._reader()
            return
        self._pending = chunk
        try:
            await self._reader()
        finally:
            self._pending = None
        # A reader that does nothing in between has taken the chunk and asked for more before this task runs again.
        if chunk.summary is not None and self._chunk is None:
            await self._reader()

    async def get(self) -> Chunk | None:
        """Return the next chunk; None once the queue is closed."""
        if self._reader_is_back is not None:
            _resolve(self._reader_is_back, None)
            self._reader_is_back = None
        if self._pending is not None:
            chunk, self._pending = self._pending, None
            return chunk
        if self._is_closed:
            return None
        self._chunk = asyncio.get_running_loop().create_future()
        following = await self._chunk
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        return following

    def close(self) -> None:
        """Let the reader know that nothing follows."""
        self._is_closed = True
        if self._chunk is not None:
            _resolve(self._chunk, None)

    async def _reader(self) -> None:
        self._reader_is_back = asyncio.get_running_loop().create_future()
        await self._reader_is_back


def _resolve(future: asyncio.Future[Chunk | None] | asyncio.Future[None], value: Chunk | None) -> None:
    """A future whose waiter was cancelled is done already."""
    if not future.done():
        future.set_result(value)  # type: ignore[arg-type]  # one of the two kinds, by the caller
