"""From a completion's rounds to the chunks that its client takes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine

from tandem.errors import DeadlineError, plural
from tandem.model.types import Chunk

Reader = asyncio.Future["Chunk | None"]
"""The wait of a reader for its next chunk."""


class ChunkPacer:
    """Hands chunks to the readers that wait for them, in order, from the next turn of the loop on.

    The turn in which a round ends belongs to the question of the next round.
    """

    # A message may end the rounds of hundreds of requests at once, and to write a chunk takes some 30 us: without
    # a limit the next answer would wait for all of them.
    def __init__(self, chunks_per_turn: int = 16) -> None:
        self._chunks_per_turn = chunks_per_turn
        self._waiting: deque[tuple[Reader, Chunk]] = deque()

    def hand_over(self, reader: Reader, chunk: Chunk) -> None:
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


PAUSE_SECONDS = 0.2
"""Held chunks are delivered when no round has ended for so long: the stream pauses, and its reader has all there is."""


class ChunkQueue:
    """Holds one chunk for one reader.

    Writing a chunk takes as long as a step of a small draft, so the next round goes first: while the reader waits,
    `put` returns at once, and the next round's first message is written before the chunk. A reader that stops delays
    the chunk after the one it has, and nothing else.
    """

    def __init__(self, stream_interval: int = 1, pacer: ChunkPacer | None = None) -> None:
        """Join chunks until they have `stream_interval` tokens, as vLLM does; the first tokens of a completion and its
        end never wait. Requests share a pacer."""
        self._interval = stream_interval
        self._pacer = pacer or ChunkPacer()
        self._held: list[Chunk] = []
        self._is_due = False
        self._has_begun = False
        """True once a chunk with tokens was put."""
        self._is_closed = False
        self._last_put = 0.0
        self._pause: asyncio.TimerHandle | None = None
        """Set while chunks are held that are not due."""
        self._reader: Reader | None = None
        """Set while the reader waits."""
        self._is_asked = asyncio.Event()
        """Set by each `get`."""

    async def put(self, chunk: Chunk) -> None:
        """Hand over a chunk, or hold it until it and the next ones have enough tokens.

        Returns once the reader has it, or at once if it is held; after the last chunk, once the reader asks for more.
        """
        self._held.append(chunk)
        is_last = chunk.summary is not None
        count = sum(len(held.token_ids) for held in self._held)
        may_wait = self._has_begun and count < self._interval and not is_last
        self._has_begun = self._has_begun or count > 0
        if may_wait:
            # Delivered if no chunk follows for a while. One timer serves many chunks, since each costs one.
            self._last_put = time.monotonic()
            if self._pause is None and not self._is_due:
                self._pause = asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._check_pause)
            return
        # It stays when this task is cancelled: a reader that is late has it before the error.
        self._is_due = True
        if self._reader is None:
            await self._next_get()
        else:
            # The reader wakes a turn of the loop later than the writer of the next round's question, which goes first.
            self._pacer.hand_over(self._reader, self._take())
            self._reader = None
        # A reader that does nothing in between has taken the chunk and asked for more before this task runs again.
        if is_last and self._reader is None:
            await self._next_get()

    async def get(self) -> Chunk | None:
        """Return the next chunk; None once the queue is closed."""
        self._is_asked.set()
        if self._held and (self._is_due or self._is_closed):
            return self._take()
        if self._is_closed:
            return None
        self._reader = asyncio.get_running_loop().create_future()
        return await self._reader

    def close(self) -> None:
        """Let the reader know that nothing follows. It gets what is held first."""
        self._is_closed = True
        if self._reader is not None:
            self._resume(self._reader, self._take() if self._held else None)

    def _resume(self, reader: Reader, chunk: Chunk | None) -> None:
        if not reader.done():  # its call was cancelled
            reader.set_result(chunk)
        self._reader = None

    async def _next_get(self) -> None:
        self._is_asked.clear()
        await self._is_asked.wait()

    def _take(self) -> Chunk:
        self._is_due = False
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        chunks = self._held
        self._held = []
        return chunks[0] if len(chunks) == 1 else Chunk.join(chunks)

    def _check_pause(self) -> None:
        self._pause = None
        if (remaining := self._last_put + PAUSE_SECONDS - time.monotonic()) > 0:
            self._pause = asyncio.get_running_loop().call_later(remaining, self._check_pause)
        elif self._reader is None:
            self._is_due = True
        else:
            self._resume(self._reader, self._take())


async def stream_of(
    run: Callable[[ChunkQueue], Coroutine[None, None, None]],
    queue: ChunkQueue,
    deadline_seconds: float | None,
) -> AsyncGenerator[Chunk]:
    """Yield a request's chunks. The request ends with its reader, and at its deadline, whatever it waits for."""
    delivered = 0

    async def run_in_time() -> None:
        async with asyncio.timeout(deadline_seconds):
            await run(queue)

    task = asyncio.create_task(run_in_time())
    task.add_done_callback(lambda _: queue.close())
    try:
        while (chunk := await queue.get()) is not None:
            yield chunk
            delivered += len(chunk.token_ids)
        await task
    except (DeadlineError, TimeoutError):
        if deadline_seconds is None:
            raise
        # A wait inside the request may notice the deadline first; the client gets the same sentence.
        raise DeadlineError(
            f"the request took longer than the {deadline_seconds:g} s it was given; {plural(delivered, 'token')} "
            f"{'was' if delivered == 1 else 'were'} delivered"
        ) from None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
