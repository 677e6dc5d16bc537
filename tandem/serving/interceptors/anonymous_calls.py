"""Bounds calls without a token, with which anyone could otherwise take all places of the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from tandem.errors import CapacityError, DeadlineError, InvalidRequestError
from tandem.serving.interceptors.handlers import Context, Handler, Interceptor, begun_at_once, behaviour_of
from tandem.serving.tokens import Scope, scope_of

MAX_WATCHERS = 128
"""Maximum Watch streams of health at once. A load balancer has one; other calls need the remaining places."""

MAX_MESSAGE_BYTES = 4 << 10
"""Maximum bytes of a message to a call without a token: it holds only the name of a service."""

# How long the one message of a call may take, which any client sends with the call itself.
_MESSAGE_SECONDS = 10.0


class AnonymousCallLimiter(Interceptor):
    """Bounds the number of calls without a token, and ends those whose message does not arrive."""

    def __init__(self) -> None:
        self._watchers = 0

    def before(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """The call's own handler, bounded if the call needs no token."""
        if scope_of(details.method) is not Scope.OPEN:
            return handler
        inner = behaviour_of(handler)
        place = self._place if handler.response_streaming else nullcontext

        async def answer(requests: AsyncIterator[Any], context: Context) -> Any:
            with place():
                return await inner(await _only(requests), context)

        return begun_at_once(handler, answer, partial(_small, handler.request_deserializer))

    @contextmanager
    def _place(self) -> Iterator[None]:
        if self._watchers >= MAX_WATCHERS:
            raise CapacityError(
                f"{MAX_WATCHERS} watchers of health are there already, which is the most; use Check, or try again"
            )
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1


def _small(read: Any, content: bytes) -> Any:
    """The message of these bytes. Its parts may be a million, so one that is too long is not parsed.

    Raises:
        DecodeError: it is too long, or no message.
    """
    if len(content) > MAX_MESSAGE_BYTES:
        raise DecodeError(f"a message has {len(content)} bytes")
    return read(content)


async def _only(requests: AsyncIterator[Any]) -> Any:
    """The message of a call with a single request.

    Raises:
        DeadlineError: it does not arrive in time.
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
