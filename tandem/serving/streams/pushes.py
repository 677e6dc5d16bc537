"""Answers to the requests of a stream, and messages that its sequence pushes in between."""

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
        requests: The requests. The stream ends with them.
        answer: Answers a request; may return None for no answer.
        pushed: Messages to push, or an error that ends the stream; None for a stream without pushes.
        translate: Turns a pushed value into a message.

    Raises:
        Exception: An error that was pushed, or that `answer` raised.
    """
    if pushed is None:
        async for request in requests:
            if (response := await answer(request)) is not None:
                yield response
        return
    arriving, push = asyncio.ensure_future(_next(requests)), asyncio.ensure_future(pushed.get())
    try:
        while True:
            await asyncio.wait((arriving, push), return_when=asyncio.FIRST_COMPLETED)
            # Requests take precedence: they make earlier pushes obsolete.
            if arriving.done():
                if not (taken := arriving.result()):
                    return
                response = await answer(taken[0])
                arriving = asyncio.ensure_future(_next(requests))
            else:
                drafted, push = push.result(), asyncio.ensure_future(pushed.get())
                response = translate(_no_error(drafted))
            if response is not None:
                yield response
    finally:
        await _cancel(arriving, push)


def _no_error(drafted: PushT | Exception) -> PushT:
    if isinstance(drafted, Exception):
        raise drafted
    return drafted


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _next(requests: AsyncIterator[RequestT]) -> tuple[RequestT, ...]:
    """Return the next request; an empty tuple at the end."""
    async for request in requests:
        return (request,)
    return ()
