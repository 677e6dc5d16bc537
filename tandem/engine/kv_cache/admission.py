"""Admission of sequences to the KV arena, in order of arrival."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

from tandem.engine.kv_cache.arena import KvUsage
from tandem.engine.kv_cache.extents import Extent, ExtentPool
from tandem.engine.kv_cache.sequence import Sequence
from tandem.errors import CapacityError, ServiceUnavailableError


class Admission:
    """Keeps account of the arena. Lives on the event loop's thread and is touched from nowhere else."""

    def __init__(self, total_tokens: int, max_sequences: int, max_waiting: int, vocabulary_size: int) -> None:
        self._pool = ExtentPool(total_tokens)
        self._max_sequences = max_sequences
        self._max_waiting = max_waiting
        self._vocabulary_size = vocabulary_size
        self._open: set[Sequence] = set()
        self._retained: OrderedDict[Extent, None] = OrderedDict()  # least recently used first
        self._waiting: deque[tuple[tuple[int, int], asyncio.Future[Sequence]]] = deque()

    async def open(self, max_length: int, extent_tokens: int = 0) -> Sequence:
        """A sequence of up to `max_length` tokens, as soon as there is room and no earlier request waits.

        Its extent holds `extent_tokens`, where that is more.

        Raises:
            CapacityError: too many requests wait.
        """
        wanted = max_length, max(extent_tokens, max_length)
        sequence = None if self._waiting else self._try_open(*wanted)
        if sequence is not None:
            return sequence
        if len(self._waiting) >= self._max_waiting:
            raise CapacityError(
                f"The KV cache is full and {len(self._waiting)} requests are waiting for room, which is the most; "
                "try later."
            )
        return await self._wait(wanted)

    def close(self, sequence: Sequence, kept: Extent | None = None) -> None:
        """Takes a sequence's room back and gives it to waiting requests.

        Args:
            sequence: a sequence that is no longer in use.
            kept: the first part of its extent, which is freed only when there is no other room; None to free all.
        """
        if sequence not in self._open:
            return
        self._open.remove(sequence)
        extent = sequence.extent
        if kept is not None:
            self._retained[kept] = None
            extent = Extent(kept.end, extent.capacity - kept.capacity)
        if extent.capacity:
            self._pool.free(extent)
        self._admit()

    def touch(self, extent: Extent) -> None:
        """Records a use of the prefix that is kept in an extent."""
        if extent in self._retained:
            self._retained.move_to_end(extent)

    def refuse_waiting(self) -> None:
        """Ends the wait of everybody: the engine is closing."""
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(ServiceUnavailableError("The engine is shutting down."))

    def usage(self) -> KvUsage:
        """KV usage and the number of waiting sequences, now."""
        retained = sum(extent.capacity for extent in self._retained)
        return KvUsage(
            total_tokens=self._pool.total_tokens,
            reserved_tokens=self._pool.reserved_tokens - retained,
            used_tokens=sum(sequence.computed_length for sequence in self._open),
            retained_tokens=retained,
            sequence_count=len(self._open),
            waiting_count=len(self._waiting),
        )

    async def _wait(self, wanted: tuple[int, int]) -> Sequence:
        future: asyncio.Future[Sequence] = asyncio.get_running_loop().create_future()
        entry = (wanted, future)
        self._waiting.append(entry)
        try:
            return await future
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._admit()  # a smaller request behind this one may fit
            elif not future.cancelled() and future.exception() is None:
                self.close(future.result())  # cancelled after room was granted, before the waiter could run
            raise

    def _admit(self) -> None:
        while self._waiting:
            wanted, future = self._waiting[0]
            if not future.done():
                sequence = self._try_open(*wanted)
                if sequence is None:
                    return
                future.set_result(sequence)
            self._waiting.popleft()

    def _try_open(self, max_length: int, extent_tokens: int) -> Sequence | None:
        if len(self._open) >= self._max_sequences:
            return None
        extent = self._pool.allocate(extent_tokens)
        while extent is None and self._retained:
            self._pool.free(self._retained.popitem(last=False)[0])
            extent = self._pool.allocate(extent_tokens)
        if extent is None:
            return None
        sequence = Sequence(extent, max_length, self._vocabulary_size)
        self._open.add(sequence)
        return sequence
