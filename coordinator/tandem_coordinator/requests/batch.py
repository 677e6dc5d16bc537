"""Batches: thousands of requests of one caller in one call, and their results as they end.

A request is read when the one before it has a place, so only one of a batch waits; those that run are bounded by the
places. Results wait for a caller that is slow to read them only as far as the bounds here allow: beyond, no further
request is read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from tandem.model.types import BatchItem, BatchOutcome, Chunk
from tandem.rpc.channels import Deadline
from tandem_coordinator.requests.runner import RequestRunner

MAX_UNREAD = 64
"""Results that may wait for their reader before no further request is read: those of a quarter of the usual places."""
MAX_UNREAD_BYTES = 4 << 20
"""The same by their size, as `_size_of` counts."""
_PIECE_BYTES = 1 << 20
"""Size at which a completion goes on in another message: a quarter of gRPC's own limit."""


class Batch:
    """The requests of one call."""

    def __init__(
        self,
        completions: RequestRunner,
        deadline_seconds: float | None,
        *,
        traceparent: str = "",
        peer: str = "",
        token: str = "",
    ) -> None:
        """Arguments are those of `RequestRunner.complete`, for all requests together."""
        self._completions = completions
        self._deadline = Deadline(deadline_seconds)
        self._traceparent = traceparent
        self._peer = peer
        self._token = token
        self._running: set[asyncio.Task[None]] = set()
        self._finished: deque[BatchOutcome] = deque()
        self._unread_bytes = 0
        self._changed = asyncio.Event()
        """Set when a result is there or taken, and at the end of the requests."""

    async def outcomes(self, items: AsyncIterator[BatchItem | BatchOutcome]) -> AsyncGenerator[BatchOutcome]:
        """The outcome of each item, in the order in which they end; of one that is an outcome itself, that.

        Whoever leaves cancels what runs.
        """
        with self._completions.admission.batch(self._peer):
            reading = asyncio.create_task(self._start_all(items))
            reading.add_done_callback(lambda _: self._changed.set())
            try:
                while self._finished or self._running or not reading.done():
                    if reading.done() and reading.exception() is not None:
                        break
                    if not self._finished:
                        await self._wait()
                        continue
                    outcome = self._finished[0]
                    yield outcome
                    # Only now has its reader taken it
                    self._finished.popleft()
                    self._unread_bytes -= sum(map(_size_of, outcome.pieces))
                    self._changed.set()
                await reading
            finally:
                tasks = [reading, *self._running]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _start_all(self, items: AsyncIterator[BatchItem | BatchOutcome]) -> None:
        async for item in items:
            if isinstance(item, BatchOutcome):
                self._end(item)
            else:
                await self._start(item)
            while len(self._finished) >= MAX_UNREAD or self._unread_bytes >= MAX_UNREAD_BYTES:
                await self._wait()

    async def _start(self, item: BatchItem) -> None:
        """Start a request, and return when it has a place or has ended."""
        has_place = asyncio.Event()
        task = asyncio.create_task(self._complete(item, has_place))
        self._running.add(task)
        task.add_done_callback(self._forget)
        await has_place.wait()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._changed.set()

    async def _complete(self, item: BatchItem, has_place: asyncio.Event) -> None:
        stream = self._completions.complete(
            item.request,
            self._deadline.remaining_seconds,
            traceparent=self._traceparent,
            peer=self._peer,
            token=self._token,
            has_place=has_place,
        )
        try:
            self._end(BatchOutcome(item.index, await _pieces_of(stream)))
        except Exception as error:  # noqa: BLE001 - it is the result of this request, and ends no other
            self._end(BatchOutcome(item.index, (), error))
        finally:
            has_place.set()

    def _end(self, outcome: BatchOutcome) -> None:
        self._finished.append(outcome)
        self._unread_bytes += sum(map(_size_of, outcome.pieces))
        self._changed.set()

    async def _wait(self) -> None:
        """Wait for the next change."""
        self._changed.clear()
        await self._changed.wait()


async def _pieces_of(stream: AsyncGenerator[Chunk]) -> tuple[Chunk, ...]:
    """A whole completion, in as few pieces as messages have room for."""
    pieces: list[Chunk] = []
    chunks: list[Chunk] = []
    size = 0
    async with aclosing(stream):
        async for chunk in stream:
            chunks.append(chunk)
            size += _size_of(chunk)
            if size >= _PIECE_BYTES or chunk.summary is not None:
                pieces.append(Chunk.join(chunks))
                chunks = []
                size = 0
    return tuple(pieces)


def _size_of(chunk: Chunk) -> int:
    """About the bytes that a chunk takes in memory, and more than in a message: a number of Python's takes 30."""
    lists = (chunk.token_ids, chunk.raw_logprobs, chunk.draft_probs, chunk.prompt_token_ids)
    scored = (*chunk.logprobs, *chunk.prompt_logprobs)
    numbers = sum(map(len, lists)) + sum(1 + len(each.top_token_ids) for each in scored)
    return 4 * len(chunk.text) + 60 * numbers
