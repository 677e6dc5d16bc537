"""Runs a request in a task of its own, and streams its chunks to a reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine

from coordinator.requests.chunks.pacing import ChunkPacer
from coordinator.requests.chunks.queue import ChunkQueue
from tandem.errors import DeadlineError
from tandem.plural import plural
from tandem.types import Chunk

RunRequest = Callable[[ChunkQueue], Coroutine[None, None, None]]
"""Runs a request and puts its chunks into the queue."""


async def stream_of(
    run: RunRequest,
    deadline_seconds: float | None,
    stream_interval: int = 1,
    pacer: ChunkPacer | None = None,
) -> AsyncGenerator[Chunk]:
    """Yield a request's chunks. The request ends with its reader, and at its deadline.

    Args:
        run: The request.
        deadline_seconds: Seconds until the request is cancelled, whatever it waits for; None: never.
        stream_interval: Tokens that a chunk has at least, except for the first, the last, and one before a pause.
        pacer: Shared with the other requests; None: one of its own.

    Raises:
        DeadlineError: the deadline has passed. The error says how many tokens were delivered.
        TandemError: the request failed.
    """
    queue, delivered = ChunkQueue(stream_interval, pacer), 0
    task = asyncio.create_task(run(queue))
    task.add_done_callback(lambda _: queue.close())
    expiry = _Expiry(task, deadline_seconds)
    try:
        while (chunk := await queue.get()) is not None:
            yield chunk
            delivered += len(chunk.token_ids)
        if not expiry.has_passed:
            await task
            return
    except DeadlineError:
        pass  # a wait inside the request noticed the deadline first; the client gets the same sentence
    finally:
        expiry.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    raise DeadlineError(
        f"the request took longer than the {deadline_seconds:g} s it was given; {plural(delivered, 'token')} "
        f"{'was' if delivered == 1 else 'were'} delivered"
    )


class _Expiry:
    """Cancels a task at its deadline."""

    def __init__(self, task: asyncio.Task[None], seconds: float | None) -> None:
        self.has_passed = False
        self._task = task
        loop = asyncio.get_running_loop()
        self._timer = None if seconds is None else loop.call_later(max(0.0, seconds), self._expire)

    def cancel(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        # A task that has already ended keeps its result.
        self.has_passed = self._task.cancel()
