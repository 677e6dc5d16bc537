"""Ends streams whose reader has not read for too long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager

from tandem.errors import DeadlineError

_LOOKS = 8
"""Number of checks of a long wait before it is acted on."""


class SlowReaderWatchdog:
    """The readers of a server's streams.

    One timer checks all of them now and then: an `asyncio.timeout` around each message took a twelfth of a
    coordinator's time with 16 requests.
    """

    def __init__(self, patience_seconds: float | None) -> None:
        """Begin without readers.

        Args:
            patience_seconds: How long one message may wait for its reader; up to an eighth longer. None: forever.
        """
        self._patience = patience_seconds
        self._readers: set[_Reader] = set()
        self._next_look: asyncio.TimerHandle | None = None

    @contextmanager
    def reading(self) -> Iterator[_Reader]:
        """Follow the reader of the running task's stream for as long as the block lasts."""
        task = asyncio.current_task()
        assert task is not None
        reader = _Reader(task, self._patience)
        self._readers.add(reader)
        if self._next_look is None and self._patience is not None:
            self._look_later(self._patience)
        try:
            yield reader
        finally:
            self._readers.discard(reader)

    def _look_later(self, patience: float) -> None:
        loop = asyncio.get_running_loop()
        self._next_look = loop.call_later(patience / _LOOKS, self._look, loop, patience)

    def _look(self, loop: asyncio.AbstractEventLoop, patience: float) -> None:
        self._next_look = None
        for reader in self._readers:
            reader.end_if_waited_since(loop.time() - patience)
        if self._readers:
            self._look_later(patience)


class _Reader:
    """The reader of one stream."""

    def __init__(self, task: asyncio.Task[object], patience: float | None) -> None:
        self._task = task
        self._patience = patience
        self._time = task.get_loop().time
        self._waits_since: float | None = None
        self._has_stalled = False

    async def take(self, write: Awaitable[None]) -> None:
        """Wait until it has taken a message.

        Raises:
            DeadlineError: it took nothing for too long.
        """
        self._waits_since = self._time()
        try:
            await write
        except asyncio.CancelledError:
            if not self._has_stalled:
                raise
            self._task.uncancel()
            raise DeadlineError(
                f"the stream was not read for {self._patience:g} s; it was ended, read faster or ask for less"
            ) from None
        self._waits_since = None

    def end_if_waited_since(self, moment: float) -> None:
        """Give up on a message that has waited since then or longer."""
        if self._waits_since is not None and self._waits_since <= moment and not self._has_stalled:
            self._has_stalled = True
            self._task.cancel()
