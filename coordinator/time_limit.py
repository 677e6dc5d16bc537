"""A completion ends when its client's time is up, whatever it is waiting for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from tandem.errors import DeadlineError
from tandem.types import Chunk


async def within(chunks: AsyncGenerator[Chunk], deadline_seconds: float | None) -> AsyncGenerator[Chunk]:
    """The same chunks, for as long as there is time. What they wait for is cancelled when it is up.

    Raises:
        DeadlineError: the time is up; it says how many tokens were delivered.
    """
    if deadline_seconds is None:  # asyncio's timeouts take 3 % of a coordinator's time under load
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk
        return
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_seconds
    delivered = 0
    async with aclosing(chunks):
        try:
            # The time may also run out between two waits, while the reader has the chunk.
            while loop.time() < end:
                # Around each wait, not around the loop: a reader that takes its time must not be cancelled in our name.
                async with asyncio.timeout_at(end):
                    chunk = await anext(chunks)
                yield chunk
                delivered += len(chunk.token_ids)
        except StopAsyncIteration:
            return
        except (TimeoutError, DeadlineError):
            pass
    raise DeadlineError(
        f"the request took longer than the {deadline_seconds:g} s it was given; {delivered} tokens were delivered"
    )
