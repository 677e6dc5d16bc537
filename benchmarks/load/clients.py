"""Where a load comes from: Tandem's gRPC client, or OpenAI's completions over HTTP, streamed."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol
from urllib.parse import urlsplit

import h11

from benchmarks.load.figures import Served
from tandem.client import Client, Retries
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
from tandem.rpc.credentials import PLAIN, Credentials
from tandem.types import GenerationRequest


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A completion that a client asks for."""

    prompt: tuple[int, ...]
    output_tokens: int
    """Its length: the end-of-sequence token does not end it."""
    temperature: float


class Connection(Protocol):
    """A client's connection, which has at most one request at once."""

    async def complete(self, request: LoadRequest, served: Served) -> None:
        """Read a completion to its end, and note in `served` when its chunks come and how many tokens it has.

        Raises:
            TandemError: it failed.
        """


Connect = Callable[[], AbstractAsyncContextManager[Connection]]
"""Makes a client's connection."""


@asynccontextmanager
async def grpc_connection(address: str, credentials: Credentials = PLAIN) -> AsyncIterator[Connection]:
    """Connect to a coordinator.

    Args:
        address: host:port.
        credentials: How to connect.
    """
    # An answer that comes at the second attempt would hide the refusal of the first.
    async with Client(address, credentials, retries=Retries(attempts=1)) as client:
        yield _GrpcConnection(client)


class _GrpcConnection:
    def __init__(self, client: Client) -> None:
        self._client = client

    async def complete(self, request: LoadRequest, served: Served) -> None:
        """See `Connection`."""
        wanted = GenerationRequest(
            request.prompt,
            max_tokens=request.output_tokens,
            temperature=request.temperature,
            ignore_eos=True,
        )
        async for chunk in self._client.generate(wanted):
            if chunk.token_ids:
                served.chunks.append(time.perf_counter())
                served.output_tokens += len(chunk.token_ids)


_CONNECT_SECONDS = 10.0
_READ_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an HTTP server listens."""

    host: str
    port: int
    is_secure: bool
    path: str
    """Before all paths that are asked for, without a slash at its end."""

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Read http://HOST[:PORT][/PATH], or the same with https.

        Raises:
            ValueError: it is neither.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.username is not None
            or parts.query
            or parts.fragment
        ):
            raise ValueError(f"{url!r} must be http://HOST:PORT or https://HOST:PORT")
        is_secure = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if is_secure else 80), is_secure, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """host:port, as the Host header has it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.is_secure else 'http'}://{self.authority}{self.path}"


class HttpExchange:
    """Requests to a server, one after the other. The connection is opened again after the server has closed it."""

    def __init__(self, origin: Origin, token: str = "") -> None:
        """Begin without a connection.

        Args:
            origin: The server.
            token: Sent as a bearer token; empty: none.
        """
        self._origin = origin
        self._token = token
        self._protocol = h11.Connection(h11.CLIENT)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, method: str, path: str, body: bytes = b"") -> int:
        """Send a request, whose answer before it was read to its end. Returns the status of the answer.

        Raises:
            ServiceUnavailableError: the server cannot be reached, or closed the connection.
            ProtocolError: it does not speak HTTP.
        """
        if self._protocol.states != {h11.CLIENT: h11.IDLE, h11.SERVER: h11.IDLE} or (
            self._streams is not None and self._streams[0].at_eof()
        ):
            await self.close()
        if self._streams is None:
            self._streams = await self._opened()
        head = h11.Request(method=method, target=self._origin.path + path, headers=self._headers(len(body)))
        events = (head, h11.Data(data=body), h11.EndOfMessage()) if body else (head, h11.EndOfMessage())
        try:
            self._streams[1].writelines([self._protocol.send(event) or b"" for event in events])
            await self._streams[1].drain()
        except OSError as error:
            raise self._lost(error) from None
        event = await self._event()
        while isinstance(event, h11.InformationalResponse):
            event = await self._event()
        if not isinstance(event, h11.Response):
            raise self._lost()
        return event.status_code

    async def pieces(self) -> AsyncIterator[bytes]:
        """The answer's body, as it comes.

        Raises:
            ServiceUnavailableError: the server closed the connection before its end.
            ProtocolError: it does not speak HTTP.
        """
        while not isinstance(event := await self._event(), h11.EndOfMessage):
            if not isinstance(event, h11.Data):
                raise self._lost()
            yield bytes(event.data)
        with suppress(h11.LocalProtocolError):  # the server wants to close it, as the next `send` notices
            self._protocol.start_next_cycle()

    async def close(self) -> None:
        """Close the connection."""
        self._protocol = h11.Connection(h11.CLIENT)
        if self._streams is not None:
            _, writer = self._streams
            self._streams = None
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _headers(self, length: int) -> list[tuple[str, str]]:
        headers = [("host", self._origin.authority), ("accept", "*/*")]
        if self._token:
            headers.append(("authorization", f"Bearer {self._token}"))
        if length:
            headers += [("content-type", "application/json"), ("content-length", str(length))]
        return headers

    async def _opened(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        origin = self._origin
        context = _trust() if origin.is_secure else None
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                return await asyncio.open_connection(origin.host, origin.port, ssl=context)
        except OSError as error:  # a TimeoutError is one
            reason = error.strerror or str(error) or f"no answer within {_CONNECT_SECONDS:g} s"
            raise ServiceUnavailableError(f"cannot connect to {origin}: {reason.lower()}") from None

    async def _event(self) -> h11.Event:
        assert self._streams is not None
        try:
            while (event := self._protocol.next_event()) is h11.NEED_DATA:
                self._protocol.receive_data(await self._streams[0].read(_READ_BYTES))
        except h11.RemoteProtocolError as error:
            if self._streams[0].at_eof():
                raise self._lost() from None
            raise ProtocolError(f"{self._origin} does not speak HTTP/1.1: {error}") from None
        except OSError as error:
            raise self._lost(error) from None
        if isinstance(event, h11.Event):
            return event
        raise self._lost()

    def _lost(self, error: OSError | None = None) -> ServiceUnavailableError:
        reason = f": {(error.strerror or str(error)).lower()}" if error is not None else ""
        return ServiceUnavailableError(
            f"{self._origin} closed the connection before its answer ended{reason}"
        )


@cache
def _trust() -> ssl.SSLContext:
    """The system's certificate authorities, read once for all connections."""
    return ssl.create_default_context()


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
