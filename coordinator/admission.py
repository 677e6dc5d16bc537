"""How many requests may run at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Admission:
    """Gives each request a place to run in."""

    def __init__(self) -> None:
        self.running = 0
        """Requests that have a place."""
        self.queued = 0
        """Requests that wait for one."""

    @asynccontextmanager
    async def place(self, deadline_seconds: float | None) -> AsyncIterator[None]:
        """A place, for as long as the block lasts.

        Args:
            deadline_seconds: How long the client waits at most; None: without end.
        """
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
