"""Sends answers as they are made: as events, or whole in parts, until the client goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from types import MappingProxyType
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coordinator.http.answers import flattened, parts
from coordinator.http.bodies import HeldBytes, Share
from coordinator.http.errors import error_object, error_response, unexpected
from tandem.errors import TandemError
from tandem.serving.interceptors import RunningCalls
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


DONE = b"data: [DONE]\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    # nginx would otherwise hold the pieces back until it has many.
    (b"x-accel-buffering", b"no"),
]


class EventStream(Response):
    """Sends objects as events. The status waits for the first of them, so that a refusal has its own."""

    last: bytes = DONE
    """The event that ends a stream."""

    def __init__(
        self,
        events: AsyncGenerator[dict[str, Any]],
        calls: RunningCalls,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Send these events, with these headers beside a stream's own."""
        # Not Response's own: there is no body to render.
        self._more_headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        self.status_code = 200
        self.background = None
        self._events = events
        self._calls = calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; a client that goes ends the completion."""
        with suppress(ClientGoneError):
            await while_connected(receive, self._send(scope, receive, send))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun, headers = False, [*_HEADERS, *self._more_headers]
        try:
            async with self._calls.running(), aclosing(self._events) as events:
                async for event in events:
                    if not has_begun:
                        has_begun = True
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                    await _more(send, self.event(event))
        except Exception as raised:  # noqa: BLE001 - the client gets an answer for any error
            error = raised if isinstance(raised, TandemError) else unexpected(raised)
            if not has_begun:
                await error_response(error)(scope, receive, send)
                return
            await _more(send, self.failure(error))
        else:
            await _more(send, self.last)
        await send({"type": "http.response.body", "body": b""})

    def event(self, content: dict[str, Any]) -> bytes:
        """An event as it is sent."""
        return data_line(content)

    def failure(self, error: TandemError) -> bytes:
        """The last event of a stream that fails after it has begun."""
        return data_line(error_object(error))


def data_line(content: dict[str, Any]) -> bytes:
    """An object as the data of an event."""
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n".encode(
        "utf-8", "replace"
    )


async def _more(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


class WholeAnswer(Response):
    """Holds what it has gathered of the answer until its client has read it."""

    def __init__(
        self,
        gather: Callable[[Share], Awaitable[None]],
        make_body: Callable[[], dict[str, Any]],
        answers: HeldBytes,
        headers: Mapping[str, str],
    ) -> None:
        """
        Args:
            gather: Gathers the answer, and counts its bytes.
            make_body: The answer once it is complete.
            answers: Bytes of all answers that are not streamed.
            headers: Sent beside the answer's own.
        """
        # Not Response's own: there is no body to render yet.
        self._more_headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        self.status_code = 200
        self.background = None
        self._gather = gather
        self._make_body = make_body
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client leaves first.

        Raises:
            CapacityError: too many bytes of such answers are held.
            TandemError: the completion failed.
        """
        with self._answers.share() as share:
            try:
                await while_connected(receive, self._gathered(share))
            except ClientGoneError:
                await Response(status_code=499)(scope, receive, send)  # the client has left
                return
            await self._send(send)

    async def _gathered(self, share: Share) -> None:
        await self._gather(share)

    async def _send(self, send: Send) -> None:
        pieces = list(flattened(self._make_body()))
        size = str(sum(map(len, pieces))).encode()
        own = [(b"content-type", b"application/json"), (b"content-length", size)]
        await send({"type": "http.response.start", "status": 200, "headers": [*own, *self._more_headers]})
        for part in parts(pieces):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)  # a client that reads fast never makes `send` wait
        await send({"type": "http.response.body", "body": b""})
