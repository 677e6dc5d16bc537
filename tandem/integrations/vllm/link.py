"""The thread that talks to the drafts: an event loop of its own, because vLLM's step is synchronous.

A step hands over its sequences and waits, at most as long as its patience. What belongs to the loop (streams, pools,
continuations) is never touched by another thread; answers cross in a `Batch`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import uvloop

from coordinator.replicas.pool import Pool
from coordinator.transport.draft_client import DraftClient
from coordinator.transport.proposal_checks import DraftLimits
from tandem.errors import TandemError
from tandem.integrations.vllm.counts import Counts
from tandem.integrations.vllm.drafted_row import Ask, DraftedRow
from tandem.integrations.vllm.drafts import first_draft
from tandem.types import DraftOptions

logger = logging.getLogger(__name__)

IDLE_SECONDS = 10.0
"""A sequence that no step has named for so long has ended: vLLM makes no more steps once its last request has ended."""
_CLOSE_SECONDS = 2.0
_START_SECONDS = 5.0
_LAST_EVENTS_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class AskedRow:
    """One sequence of a step."""

    key: int
    new_tokens: Sequence[int]
    """Tokens since its last step."""
    ask: Ask


@dataclass(slots=True)
class Batch:
    """One step: what it asks, and the answers so far."""

    rows: Sequence[AskedRow]
    ended: Sequence[int] = ()
    """Keys of sequences that have ended."""
    answers: list[tuple[int, ...]] = field(default_factory=list)
    """One for each row; empty until it has come."""
    done: threading.Event = field(default_factory=threading.Event)
    left: int = 0
    """Answers that are still to come."""
    timed_out: bool = False
    """True if the wait for one of them was in vain."""

    def __post_init__(self) -> None:
        self.answers = [() for _ in self.rows]


@dataclass(slots=True)
class _Entry:
    """A sequence, and the work in progress for it."""

    row: DraftedRow
    unread: list[int] = field(default_factory=list)
    """Tokens that came while a proposal was awaited."""
    task: asyncio.Task[tuple[int, ...]] | None = None
    seen_at: float = 0.0

    @property
    def is_busy(self) -> bool:
        return self.task is not None and not self.task.done()


class DraftLink:
    """Owns the thread, the pool and every sequence's place on a draft."""

    def __init__(
        self,
        make_pool: Callable[[], Pool[DraftClient]],
        options: Callable[[int], DraftOptions],
        limits: DraftLimits,
        counts: Counts,
        idle_seconds: float | None = None,
    ) -> None:
        """
        Args:
            make_pool: Makes the pool, on the loop.
            options: Options with which the sequence of that key opens.
            limits: Bounds of proposals.
            counts: What it does is added to.
            idle_seconds: After so long without a step a sequence is taken to have ended; by default `IDLE_SECONDS`.
        """
        self._make_pool = make_pool
        self._options = options
        self._limits = limits
        self._counts = counts
        self._idle_seconds = IDLE_SECONDS if idle_seconds is None else idle_seconds
        self._entries: dict[int, _Entry] = {}
        self._endings: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: Pool[DraftClient] | None = None
        self._stopping: asyncio.Event | None = None
        self._is_running = threading.Event()
        self._may_answer = False
        """True if a draft that is not late held any sequence of the last step. Without one a step waits for nothing."""
        self._thread = threading.Thread(target=self._run, name="tandem-drafts", daemon=True)

    @property
    def open_sequences(self) -> int:
        """Sequences that it keeps now."""
        return len(self._entries)

    def start(self, wait_seconds: float) -> str:
        """Start the thread, and wait for a draft: empty when one is ready, otherwise the reason why none is."""
        self._thread.start()
        self._is_running.wait(_START_SECONDS)
        if self._loop is None or self._pool is None:
            return "the thread that talks to the drafts did not start"
        waiting = asyncio.run_coroutine_threadsafe(first_draft(self._pool, wait_seconds), self._loop)
        try:
            return waiting.result(wait_seconds + _START_SECONDS)
        except TimeoutError:
            return "no draft answered"

    def close(self) -> None:
        """End all sequences and the thread."""
        loop, stopping = self._loop, self._stopping
        if loop is None or stopping is None or not self._thread.is_alive():
            return
        loop.call_soon_threadsafe(stopping.set)
        self._thread.join(_CLOSE_SECONDS)

    def ask(self, batch: Batch, seconds: float) -> None:
        """Have the drafts propose for a step, and wait until all have answered, at most so many seconds.

        The first step of sequences only opens them on a draft, so it does not wait either.
        """
        if self._loop is None or not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._begin, batch)
        if self._may_answer and batch.rows and seconds > 0.0 and not batch.done.wait(seconds):
            batch.timed_out = True

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._pool = self._make_pool()
        try:
            await self._pool.start()
            self._is_running.set()
            sweeping = asyncio.create_task(self._sweep())
            await self._stopping.wait()
            sweeping.cancel()
        except TandemError as error:
            logger.error("no draft can be reached", extra={"reason": str(error)})  # noqa: TRY400 - a sentence is enough
        finally:
            self._is_running.set()
            await self._end()

    async def _end(self) -> None:
        await asyncio.gather(
            *(entry.row.finish() for entry in self._entries.values()), return_exceptions=True
        )
        self._entries.clear()
        if self._pool is not None:
            await self._pool.close()
        # gRPC tells of cancelled calls a little later, and a loop that is closed by then is an error to it.
        await asyncio.sleep(_LAST_EVENTS_SECONDS)

    def _begin(self, batch: Batch) -> None:
        """Start the work for a step's rows. Nothing here waits."""
        for key in batch.ended:
            self._forget(key)
        now = time.monotonic()
        left = len(batch.rows)
        for index, asked in enumerate(batch.rows):
            entry = self._entry(asked.key)
            entry.seen_at = now
            if entry.is_busy:
                entry.unread += asked.new_tokens
                self._counts.late_rows += 1
                left -= 1
                continue
            entry.row.extend([*entry.unread, *asked.new_tokens])
            entry.unread = []
            entry.task = asyncio.create_task(entry.row.propose(asked.ask))
            entry.task.add_done_callback(partial(self._answered, batch, index, entry.row))
        batch.left = left
        if left == 0:
            self._end_batch(batch)

    def _answered(
        self, batch: Batch, index: int, row: DraftedRow, task: asyncio.Task[tuple[int, ...]]
    ) -> None:
        batch.timed_out |= row.timed_out
        if not task.cancelled():
            error = task.exception()
            if error is None:
                batch.answers[index] = task.result()
            else:
                logger.error("a proposal failed", exc_info=error)
        batch.left -= 1
        if batch.left == 0:
            self._end_batch(batch)

    def _end_batch(self, batch: Batch) -> None:
        entries = map(self._entries.get, (asked.key for asked in batch.rows))
        self._may_answer = any(entry is not None and entry.row.may_answer for entry in entries)
        batch.done.set()

    def _entry(self, key: int) -> _Entry:
        entry = self._entries.get(key)
        if entry is None:
            assert self._pool is not None, "batches come after the start"
            row = DraftedRow(self._pool, self._options(key), self._limits, self._counts)
            entry = self._entries[key] = _Entry(row)
            self._counts.started_sequences += 1
        return entry

    def _forget(self, key: int) -> None:
        """A sequence has ended: free it on its draft."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._counts.ended_sequences += 1
            self._background(self._finish(entry))

    async def _finish(self, entry: _Entry) -> None:
        if entry.task is not None:
            await asyncio.wait({entry.task}, timeout=_CLOSE_SECONDS)
        await entry.row.finish()

    def _background(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _sweep(self) -> None:
        """Leave the drafts for sequences that no step names any more. Their tokens stay: vLLM may have paused."""
        while True:
            await asyncio.sleep(self._idle_seconds / 4)
            before = time.monotonic() - self._idle_seconds
            for entry in self._entries.values():
                if entry.seen_at < before and not entry.is_busy and entry.row.is_placed:
                    self._background(self._finish(entry))
