"""The next round begins before the client is handed the piece that the last one made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from tandem.types import Chunk

_TURNS = 3
"""Of the event loop: in the first the round begins, in the second a task of its own puts its question to the draft, and
in the third that is written, with those of others."""


async def one_ahead(chunks: AsyncGenerator[Chunk]) -> AsyncGenerator[Chunk]:
    """The same chunks, each handed out once the round after it has put its question, and closed at the end.

    Writing to a client takes as long as a draft's step; with the services at work meanwhile it takes no time of the
    round. A reader that stops is one round behind, and no more. What follows the last chunk waits until it was taken:
    only then is the request complete.
    """
    upcoming = _begin(chunks)
    try:
        while (chunk := await upcoming) is not None:
            if chunk.summary is None:
                upcoming = _begin(chunks)
                for _ in range(_TURNS):
                    await asyncio.sleep(0)
                yield chunk
            else:
                yield chunk
                upcoming = _begin(chunks)
    finally:
        upcoming.cancel()
        await asyncio.gather(upcoming, return_exceptions=True)
        await chunks.aclose()


def _begin(chunks: AsyncGenerator[Chunk]) -> asyncio.Task[Chunk | None]:
    return asyncio.create_task(_next(chunks))


async def _next(chunks: AsyncGenerator[Chunk]) -> Chunk | None:
    return await anext(chunks, None)
