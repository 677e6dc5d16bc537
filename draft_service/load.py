"""How busy the draft is, for callers that share it without knowing of each other."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TypeVar

from tandem.types import DraftLoad, Proposal

SequenceT = TypeVar("SequenceT")


class LoadTracker:
    """Counts sequences and times waits. Belongs to one event loop."""

    def __init__(self, is_full: Callable[[], bool]) -> None:
        self.sequences = self.waiting = 0
        self._is_full = is_full
        self._wait_seconds = 0.0
        self._answered_at = 0.0

    @property
    def now(self) -> DraftLoad:
        # Nobody waits at a draft that has answered nothing for so long
        is_idle = time.monotonic() - self._answered_at > 1.0
        wait = 0.0 if is_idle else self._wait_seconds
        return DraftLoad(self.sequences, self.waiting, self._is_full(), wait)

    @asynccontextmanager
    async def sequence(self, opening: AbstractAsyncContextManager[SequenceT]) -> AsyncIterator[SequenceT]:
        """A sequence, which waits until it has its place."""
        async with AsyncExitStack() as stack:
            self.waiting += 1
            try:
                drafted = await stack.enter_async_context(opening)
            finally:
                self.waiting -= 1
            self.sequences += 1
            try:
                yield drafted
            finally:
                self.sequences -= 1

    def answered(self, seconds: float, proposal: Proposal) -> None:
        """A step was answered after so many seconds. One that only read says nothing: it has no cost of its own."""
        if proposal.cost is not None:
            wait = max(seconds - proposal.cost.seconds, 0.0)
            # Weight of the newest wait: some ten steps, a few rounds of a busy draft
            self._wait_seconds += 0.1 * (wait - self._wait_seconds)
            self._answered_at = time.monotonic()
