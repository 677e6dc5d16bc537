"""Answers of a stream together with what its sequence pushes unasked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")
PushT = TypeVar("PushT")


async def answered(
    requests: AsyncIterator[RequestT],
    answer: Callable[[RequestT], Awaitable[AnswerT | None]],
    pushed: asyncio.Queue[PushT | Exception] | None,
    translate: Callable[[PushT], AnswerT],
) -> AsyncGenerator[AnswerT]:
    """Answer one request after the other, and pass on what is pushed between them.

    Args:
        requests: What is asked. Their end is the stream's end.
        answer: Answers a request; None for no answer.
        pushed: What is pushed, or an error that ends the stream; None where nothing ever is.
        translate: Makes a message of it.

    Raises:
        Exception: whatever was pushed as an error, or `answer` raised.
    """
    if pushed is None:
        async for request in requests:
            if (response := await answer(request)) is not None:
                yield response
        return
    asked, push = asyncio.ensure_future(_next(requests)), asyncio.ensure_future(pushed.get())
    try:
        while True:
            await asyncio.wait((asked, push), return_when=asyncio.FIRST_COMPLETED)
            # A request first: what was pushed before it is out of date.
            if asked.done():
                if not (taken := asked.result()):
                    return
                response = await answer(taken[0])
                asked = asyncio.ensure_future(_next(requests))
            else:
                drafted, push = push.result(), asyncio.ensure_future(pushed.get())
                response = translate(_no_error(drafted))
            if response is not None:
                yield response
    finally:
        await _dropped(asked, push)


def _no_error(drafted: PushT | Exception) -> PushT:
    if isinstance(drafted, Exception):
        raise drafted
    return drafted


async def _dropped(*tasks: asyncio.Future[Any]) -> None:
    """End the tasks, whatever they were waiting for."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _next(requests: AsyncIterator[RequestT]) -> tuple[RequestT, ...]:
    """The next request; empty at the end."""
    async for request in requests:
        return (request,)
    return ()
