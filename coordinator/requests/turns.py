"""Work on large inputs that holds the interpreter, done for one request at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

LARGE_BYTES = 16 << 10
"""Parsing a larger message takes a turn. Protobuf and pydantic parse a smaller one in at most 3 ms."""


_REST = 2.0
"""How long the rest after a turn is, by the turn."""


class Turns:
    """Lets one request at a time hold the interpreter, and lets all others run for twice as long after it.

    Neither pydantic nor protobuf releases the interpreter while it parses, so a thread would not help. Without turns,
    large requests that arrive together are parsed back to back, and every stream of the process waits for all of them.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn. The block must not await anything: its duration decides when the next turn begins."""
        await self._lock.acquire()
        began = time.perf_counter()
        try:
            yield
        finally:
            rest = _REST * (time.perf_counter() - began)
            asyncio.get_running_loop().call_later(rest, self._lock.release)
