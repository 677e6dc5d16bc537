"""Concurrent completions of one HTTP request, cancelled when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import TypeVar

from starlette.types import Receive

from tandem.types import Chunk

ResultT = TypeVar("ResultT")

# Pieces of all completions together that may wait for a reader.
_WAITING = 1


class ClientGoneError(Exception):
    """The client no longer waits for the answer."""


async def while_connected(receive: Receive, work: Coroutine[None, None, ResultT]) -> ResultT:
    """Do the work unless the client goes first, which cancels it.

    Raises:
        ClientGoneError: the client went.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    """Return when the client has closed the connection; its body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def merged(streams: Sequence[AsyncGenerator[Chunk]]) -> AsyncGenerator[tuple[int, Chunk]]:
    """The chunks of several completions as they arrive, each with the number of its completion.

    A completion that fails ends the others. They advance only as fast as they are read.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for chunk in stream:
                yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, Chunk] | BaseException | None] = asyncio.Queue(_WAITING)
    tasks = [asyncio.create_task(_feed(queue, index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(
    queue: asyncio.Queue[tuple[int, Chunk] | BaseException | None], index: int, stream: AsyncGenerator[Chunk]
) -> None:
    try:
        async with aclosing(stream):
            async for chunk in stream:
                await queue.put((index, chunk))
        await queue.put(None)
    except Exception as error:  # noqa: BLE001 - the reader gets any error
        await queue.put(error)
