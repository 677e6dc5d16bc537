"""The headers of answers: the names of our own, and values that HTTP can carry."""

from __future__ import annotations

import re

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem_coordinator.http.errors import error_response

IGNORED_HEADER = "X-Tandem-Ignored"
"""Names the fields of a request that were passed over."""

ALONE_HEADER = "X-Tandem-Target-Alone"
"""Names the fields because of which the target serves a request without the draft."""

REQUEST_ID_HEADER = b"x-request-id"
"""A client's own name for a request, of which the answer repeats 256 bytes; OpenAI's clients show it with errors."""

_MAX_NAMES = 16
"""Names in one header; a client may send any number of fields."""
_UNFIT_IN_NAME = re.compile(r"[^A-Za-z0-9_.-]")
# RFC 9110 5.5: visible characters, with spaces and tabs between them alone.
_UNFIT_IN_VALUE = re.compile(rb"[^\t\x20-\x7e\x80-\xff]")


def header_value(value: bytes) -> bytes:
    """The value as HTTP can carry it, whatever it is made of."""
    return _UNFIT_IN_VALUE.sub(b"?", value).strip(b" \t")


def fit(name: str) -> str:
    """A client's name as headers and logs may have it. An empty one is shown as two quotation marks."""
    return _UNFIT_IN_NAME.sub("?", name)[:80] or '""'


def ignored_header(*names: str) -> dict[str, str]:
    """The header with the names of ignored fields; none without any."""
    return {IGNORED_HEADER: ", ".join(map(fit, names[:_MAX_NAMES]))} if names else {}


def with_sendable_headers(app: ASGIApp) -> ASGIApp:
    """The application, whose answers with headers that cannot be sent become errors. The server would close the
    connection of such an answer without a word."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_replaced = False

        async def send_or_replace(message: Message) -> None:
            nonlocal is_replaced
            if is_replaced:
                return
            if message["type"] == "http.response.start":
                try:
                    h11.Response(status_code=message["status"], headers=message["headers"])
                except h11.LocalProtocolError as error:
                    is_replaced = True
                    await error_response(error)(scope, receive, send)
                    return
            await send(message)

        await app(scope, receive, send_or_replace)

    return answer
