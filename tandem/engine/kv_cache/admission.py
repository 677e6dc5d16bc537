"""Admission of sequences, in order of arrival: so many may be open at once."""

from __future__ import annotations

import asyncio
from collections import deque

from tandem.engine.kv_cache.arena import KvArena
from tandem.engine.kv_cache.page_table import PageTable
from tandem.engine.kv_cache.sequence import Sequence
from tandem.engine.settings import EngineSettings
from tandem.errors import CapacityError, ServiceUnavailableError

_Wanted = tuple[int, int]
"""Length and spare tokens."""


class Admission:
    """Counts the open sequences. Lives on the event loop's thread and is touched from nowhere else."""

    def __init__(self, settings: EngineSettings, vocabulary_size: int, arena: KvArena) -> None:
        """
        Args:
            settings: say how many may be open at once, and how many may wait.
            vocabulary_size: ids of sequences are below it.
            arena: where sequences have their pages.
        """
        self._max_sequences = settings.max_sequences
        self._max_waiting = settings.max_waiting
        self._vocabulary_size = vocabulary_size
        self._page_tokens = arena.page_tokens
        self._total_tokens = arena.page_count * arena.page_tokens
        self._windows = arena.windows
        self._open: set[Sequence] = set()
        self._waiting: deque[tuple[_Wanted, asyncio.Future[Sequence]]] = deque()

    @property
    def open_count(self) -> int:
        """Open sequences."""
        return len(self._open)

    @property
    def waiting_count(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    async def open(self, max_length: int, spare_tokens: int = 0) -> Sequence:
        """A sequence of up to `max_length` tokens, as soon as no more than `max_sequences` are open.

        Its pages are given to it later, as it grows; `spare_tokens` more behind its end, as long as there are any.

        Raises:
            CapacityError: too many requests wait.
        """
        wanted = max_length, spare_tokens
        if not self._waiting and len(self._open) < self._max_sequences:
            return self._opened(wanted)
        if len(self._waiting) >= self._max_waiting:
            raise CapacityError(
                f"{len(self._open)} sequences are open and {len(self._waiting)} requests are waiting, which is the "
                "most; try later."
            )
        return await self._wait(wanted)

    def close(self, sequence: Sequence) -> None:
        """Gives the place of a sequence that is no longer in use to a request that waits."""
        if sequence not in self._open:
            return
        self._open.remove(sequence)
        self._admit()

    def refuse_waiting(self) -> None:
        """Ends the wait of everybody: the engine is closing."""
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(ServiceUnavailableError("The engine is shutting down."))

    async def _wait(self, wanted: _Wanted) -> Sequence:
        future: asyncio.Future[Sequence] = asyncio.get_running_loop().create_future()
        entry = (wanted, future)
        self._waiting.append(entry)
        try:
            return await future
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            elif not future.cancelled() and future.exception() is None:
                self.close(future.result())  # cancelled after it was admitted, before the waiter could run
            raise

    def _admit(self) -> None:
        while self._waiting and len(self._open) < self._max_sequences:
            wanted, future = self._waiting.popleft()
            if not future.done():
                future.set_result(self._opened(wanted))

    def _opened(self, wanted: _Wanted) -> Sequence:
        max_length, spare_tokens = wanted
        most_tokens = min(max_length + spare_tokens, max(self._total_tokens, max_length))
        tables = [PageTable(self._page_tokens, most_tokens, window=window) for window in self._windows]
        sequence = Sequence(tables, max_length, self._vocabulary_size, spare_tokens)
        self._open.add(sequence)
        return sequence
