"""Server-sent events: streams an answer chunk by chunk, until its client disconnects."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from types import MappingProxyType
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coordinator.http.errors import error_object, error_response, unexpected
from coordinator.http.tasks import ClientGoneError, while_connected
from tandem.errors import TandemError
from tandem.serving.interceptors import RunningCalls

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
