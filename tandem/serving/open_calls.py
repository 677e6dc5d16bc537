"""Bounds the calls that need no token: whoever reaches the server could hold all of its places with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import grpc

from tandem.errors import CapacityError, DeadlineError, InvalidRequestError
from tandem.serving.handlers import Context, Handler, Interceptor, begun_at_once, behaviour_of
from tandem.serving.tokens import Scope, scope_of

MOST_WATCHERS = 128
"""Most streams of health at once. A load balancer has one; the other places are for those who may call."""

# How long the one message of a call may take, which any client sends with the call itself.
_MESSAGE_SECONDS = 10.0


class OpenCalls(Interceptor):
    """Lets few calls stay that anybody may make, and none that keeps its message back."""

    def __init__(self) -> None:
        self._watchers = 0

    def before(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """The call's own handler, bounded when anybody may call it."""
        if scope_of(details.method) is not Scope.OPEN:
            return handler
        inner = behaviour_of(handler)
        place = self._place if handler.response_streaming else nullcontext

        async def answer(requests: AsyncIterator[Any], context: Context) -> Any:
            with place():
                return await inner(await _only(requests), context)

        return begun_at_once(handler, answer)

    @contextmanager
    def _place(self) -> Iterator[None]:
        if self._watchers >= MOST_WATCHERS:
            raise CapacityError(
                f"{MOST_WATCHERS} watchers of health are there already, which is the most; use Check, or try again"
            )
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1


async def _only(requests: AsyncIterator[Any]) -> Any:
    """The message of a call that has one.

    Raises:
        DeadlineError: it does not come.
        InvalidRequestError: the call ended without it.
    """
    try:
        async with asyncio.timeout(_MESSAGE_SECONDS):
            return await anext(requests)
    except TimeoutError:
        raise DeadlineError(
            f"no message came for {_MESSAGE_SECONDS:g} s; it must be sent with the call"
        ) from None
    except StopAsyncIteration:
        raise InvalidRequestError("the call ended without a message; it must have one") from None
