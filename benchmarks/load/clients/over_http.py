"""OpenAI's completions over HTTP, streamed: Tandem's own port, vLLM's server, or any other that speaks it."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.load.clients.connection import Connection, LoadRequest
from benchmarks.load.clients.http_exchange import HttpExchange, Origin
from benchmarks.load.figures import Served
from tandem.errors import (
    CapacityError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    ProtocolError,
    ServiceUnavailableError,
    TandemError,
    UnauthenticatedError,
)

_OK = 200
_ERRORS: dict[int, type[TandemError]] = {
    401: UnauthenticatedError,
    403: PermissionDeniedError,
    404: NotFoundError,
    408: DeadlineError,
    429: CapacityError,
    502: ServiceUnavailableError,
    503: ServiceUnavailableError,
    504: DeadlineError,
}
_FIRST_SERVER_ERROR = 500
_MAX_WORDS = 300
"""Characters of an error that are shown."""
_DATA = b"data:"
_DONE = b"[DONE]"


def origin_of(url: str) -> Origin:
    """Read the address of an OpenAI-compatible server, with or without `/v1` at its end.

    Raises:
        ValueError: it is none.
    """
    origin = Origin.parse(url)
    return Origin(origin.host, origin.port, origin.is_secure, origin.path.removesuffix("/v1"))


async def served_model(origin: Origin, token: str = "") -> str:
    """Name of the first model that a server lists.

    Raises:
        ServiceUnavailableError: the server cannot be reached.
        TandemError: it refuses, or lists no model.
    """
    exchange = HttpExchange(origin, token)
    try:
        status = await exchange.send("GET", "/v1/models")
        content = b"".join([piece async for piece in exchange.pieces()])
    finally:
        await exchange.close()
    if status != _OK:
        raise _refusal(origin, status, content)
    try:
        return str(json.loads(content)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ProtocolError(f"{origin}/v1/models lists no model; name one with --model") from None


@asynccontextmanager
async def http_connection(origin: Origin, model: str, token: str = "") -> AsyncIterator[Connection]:
    """A connection to an OpenAI-compatible server.

    Args:
        origin: The server.
        model: Name of the model to ask for.
        token: Sent as a bearer token; empty: none.
    """
    exchange = HttpExchange(origin, token)
    try:
        yield _HttpConnection(exchange, origin, model)
    finally:
        await exchange.close()


class _HttpConnection:
    def __init__(self, exchange: HttpExchange, origin: Origin, model: str) -> None:
        self._exchange = exchange
        self._origin = origin
        self._model = model

    async def complete(self, request: LoadRequest, served: Served) -> None:
        """See `Connection`. A server that reports no usage is counted a token for each chunk."""
        try:
            status = await self._exchange.send("POST", "/v1/completions", self._body(request))
            if status != _OK:
                content = b"".join([piece async for piece in self._exchange.pieces()])
                raise _refusal(self._origin, status, content)
            usage: int | None = None
            async for event in _events(self._exchange.pieces()):
                if "error" in event:
                    raise TandemError(f"{self._origin} ended a completion: {_words(event)}")
                if any(choice.get("text") for choice in event.get("choices") or ()):
                    served.chunks.append(time.perf_counter())
                usage = (event.get("usage") or {}).get("completion_tokens", usage)
        except TandemError:
            await self._exchange.close()  # half an answer may follow
            raise
        served.output_tokens = len(served.chunks) if usage is None else usage

    def _body(self, request: LoadRequest) -> bytes:
        return json.dumps(
            {
                "model": self._model,
                "prompt": request.prompt,
                "max_tokens": request.output_tokens,
                "temperature": request.temperature,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of server-sent events (WHATWG HTML, 9.2), each on one line as OpenAI's API has them.

    Raises:
        ProtocolError: one is no JSON object.
    """
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if not line.startswith(_DATA) or (data := line[len(_DATA) :].strip()) == _DONE:
                continue
            try:
                event = json.loads(data)
            except ValueError:
                event = None
            if not isinstance(event, dict):
                raise ProtocolError(f"an event of a completion is no JSON object: {data[:_MAX_WORDS]!r}")
            yield event


def _refusal(origin: Origin, status: int, content: bytes) -> TandemError:
    others = TandemError if status >= _FIRST_SERVER_ERROR else InvalidRequestError
    try:
        words = _words(json.loads(content))
    except ValueError:
        words = content.decode(errors="replace")
    told = f": {words[:_MAX_WORDS]}" if words else ""
    return _ERRORS.get(status, others)(f"{origin} answered {status}{told}")


def _words(answer: Any) -> str:
    """The message of an error in OpenAI's form, vLLM's older one, or any other."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error) if isinstance(error, dict) else error)
