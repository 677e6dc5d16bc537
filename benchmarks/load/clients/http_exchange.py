"""HTTP/1.1 over one connection that is kept, with as little work for each piece of a body as h11 allows."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from urllib.parse import urlsplit

import h11

from tandem.errors import ProtocolError, ServiceUnavailableError

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
