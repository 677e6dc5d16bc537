"""Sends answers: as events while they are made, or whole, in parts. A client that goes ends its completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, closing, suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coordinator.http.answers import Answer, flattened, parts
from coordinator.http.bodies import HeldBytes, Share
from coordinator.http.errors import error_response, unexpected
from tandem.errors import TandemError
from tandem.serving.interceptors import RunningCalls
from tandem.serving.server import CancelledByEventError, unless
from tandem.types import Chunk

_EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    # nginx would otherwise hold the pieces back until it has many.
    "x-accel-buffering": "no",
}


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
    queue: asyncio.Queue[tuple[int, Chunk] | Exception | None] = asyncio.Queue(1)

    async def feed(index: int, stream: AsyncGenerator[Chunk]) -> None:
        try:
            async with aclosing(stream):
                async for chunk in stream:
                    await queue.put((index, chunk))
            await queue.put(None)
        except Exception as error:  # noqa: BLE001 - the reader gets any error
            await queue.put(error)

    tasks = [asyncio.create_task(feed(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Sends events. The status waits for the first of them, so that a refusal has its own."""

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        failure: Callable[[TandemError], bytes],
        calls: RunningCalls,
        headers: Mapping[str, str],
    ) -> None:
        """A stream of these events; `failure` makes the last one of a stream that fails after it has begun."""
        super().__init__(headers={**_EVENT_HEADERS, **headers})
        del self.headers["content-length"]
        self._events = events
        self._calls = calls
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; a client that goes ends the completion."""
        with suppress(CancelledByEventError):
            await unless(_disconnect(receive), self._send(scope, receive, send))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False
        try:
            async with self._calls.running(), aclosing(self._events) as events:
                async for event in events:
                    if not has_begun:
                        has_begun = True
                        await send(
                            {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                        )
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as raised:  # noqa: BLE001 - the client gets an answer for any error
            error = raised if isinstance(raised, TandemError) else unexpected(raised)
            if not has_begun:
                await error_response(error)(scope, receive, send)
                return
            await send({"type": "http.response.body", "body": self._failure(error), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class WholeAnswer(Response):
    """Gathers an answer, and holds it until its client has read it."""

    def __init__(
        self,
        answer: Answer,
        chunks: AsyncGenerator[tuple[int, Chunk]],
        calls: RunningCalls,
        held: HeldBytes,
        headers: Mapping[str, str],
    ) -> None:
        """The answer once it has all chunks; `held`: bytes of all such answers."""
        super().__init__(media_type="application/json", headers=headers)
        self._answer, self._chunks, self._calls, self._held = answer, chunks, calls, held

    async def _gather(self, share: Share) -> dict[str, Any]:
        async with self._calls.running(), aclosing(self._chunks) as chunks:
            async for index, chunk in chunks:
                share.add(self._answer.keep(index, chunk))
        return self._answer.whole()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client leaves first."""
        with closing(Share(self._held)) as share, suppress(CancelledByEventError):
            pieces = list(flattened(await unless(_disconnect(receive), self._gather(share))))
            self.headers["content-length"] = str(sum(map(len, pieces)))
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            for part in parts(pieces):
                await send({"type": "http.response.body", "body": part, "more_body": True})
                await asyncio.sleep(0)  # a client that reads fast never makes `send` wait
            await send({"type": "http.response.body", "body": b""})
