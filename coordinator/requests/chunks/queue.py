"""Hands chunks from the task that runs a request to the reader that streams them to the client."""

from __future__ import annotations

import asyncio
import time

from coordinator.requests.chunks.held import HeldChunks
from coordinator.requests.chunks.pacing import ChunkPacer
from tandem.types import Chunk

PAUSE_SECONDS = 0.2
"""Held chunks are delivered when no round has ended for so long: the stream pauses, and its reader has all there is."""


class ChunkQueue:
    """Holds one chunk for one reader.

    Writing a chunk takes as long as a step of a small draft, so the next round goes first: while the reader waits,
    `put` returns at once, and the next round's first message is written before the chunk. A reader that stops delays
    the chunk after the one it has, and nothing else.
    """

    def __init__(self, stream_interval: int = 1, pacer: ChunkPacer | None = None) -> None:
        """Begin without chunks.

        Args:
            stream_interval: Join chunks until they have so many tokens; 1: deliver each as it comes.
            pacer: Shared with the other requests; None: one of its own.
        """
        self._held = HeldChunks(stream_interval)
        self._pacer = pacer or ChunkPacer()
        self._last_put = 0.0
        self._pause: asyncio.TimerHandle | None = None
        """Set while chunks are held."""
        self._is_paused = False
        """True if chunks are held that the reader is to have as soon as it asks."""
        self._chunk: asyncio.Future[Chunk | None] | None = None
        """Set while the reader waits."""
        self._pending: Chunk | None = None
        """A chunk that the reader has not taken yet."""
        self._reader_is_back: asyncio.Future[None] | None = None
        """Set while the writer waits."""
        self._is_closed = False

    async def put(self, chunk: Chunk) -> None:
        """Hand over a chunk, or hold it until it and the next ones have enough tokens.

        Returns once the reader has it, or at once if it is held; after the last chunk, once the reader asks for more.
        """
        if not self._held.add(chunk):
            self._watch_for_pause()
            return
        chunk = self._taken()
        if self._chunk is not None:
            # The reader wakes a turn of the loop later than the writer of the next round's question, which goes first.
            self._pacer.hand_over(self._chunk, chunk)
            self._chunk = None
            if chunk.summary is not None:
                await self._reader()
            return
        # It stays when this task is cancelled: a reader that is late has it before the error.
        self._pending = chunk
        await self._reader()
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
        if self._held and (self._is_paused or self._is_closed):
            return self._taken()
        if self._is_closed:
            return None
        self._chunk = asyncio.get_running_loop().create_future()
        return await self._chunk

    def close(self) -> None:
        """Let the reader know that nothing follows. It gets what is held first."""
        self._is_closed = True
        self._end_watch()
        if self._chunk is not None:
            _resolve(self._chunk, self._taken() if self._held else None)
            self._chunk = None

    def _taken(self) -> Chunk:
        """All that is held, as one chunk."""
        self._end_watch()
        return self._held.take()

    def _watch_for_pause(self) -> None:
        """Deliver what is held if no chunk follows for a while. One timer serves many chunks, since each costs one."""
        loop = asyncio.get_running_loop()
        self._last_put = time.monotonic()
        if self._pause is None and not self._is_paused:
            self._pause = loop.call_later(PAUSE_SECONDS, self._check_pause)

    def _check_pause(self) -> None:
        remaining = self._last_put + PAUSE_SECONDS - time.monotonic()
        if remaining > 0:
            self._pause = asyncio.get_running_loop().call_later(remaining, self._check_pause)
            return
        self._pause = None
        if self._chunk is None:
            self._is_paused = True
        else:
            _resolve(self._chunk, self._taken())
            self._chunk = None

    def _end_watch(self) -> None:
        self._is_paused = False
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None

    async def _reader(self) -> None:
        self._reader_is_back = asyncio.get_running_loop().create_future()
        await self._reader_is_back


def _resolve(future: asyncio.Future[Chunk | None] | asyncio.Future[None], value: Chunk | None) -> None:
    """A future whose waiter was cancelled is done already."""
    if not future.done():
        future.set_result(value)  # type: ignore[arg-type]  # one of the two kinds, by the caller
