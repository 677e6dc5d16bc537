"""The HTTP server ends stalled and silent clients, and shuts down."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem_coordinator.http import server as server_module
from tandem_coordinator.http.answers import wait_for_disconnect
from tandem_coordinator.http.server import HttpServer
from tandem_coordinator.settings.coordinator import CoordinatorSettings
from tests.service.clients import until

SECONDS = 10.0
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class Endless:
    """Streams without end until the client disconnects."""

    def __init__(self, piece_bytes: int = 1 << 16) -> None:
        self.running = 0
        self.sent = 0
        self._piece = bytes(piece_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        self.running += 1
        gone = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            while not gone.done():
                await send({"type": "http.response.body", "body": self._piece, "more_body": True})
                self.sent += len(self._piece)
                await asyncio.sleep(0)
        finally:
            self.running -= 1
            gone.cancel()


@asynccontextmanager
async def listening(app: ASGIApp, stalled_reader_seconds: float = 60.0) -> AsyncIterator[int]:
    bounds: dict[str, Any] = {"stalled_reader_timeout_seconds": stalled_reader_seconds}
    settings = CoordinatorSettings(
        target_address="127.0.0.1:1", http_port=0, http_max_connections=8, **bounds
    )
    server = HttpServer(settings, app)
    server.start()
    try:
        yield int(server.url.rpartition(":")[2])
    finally:
        async with asyncio.timeout(SECONDS):
            await server.close()


@asynccontextmanager
async def connected(
    app: ASGIApp, stalled_reader_seconds: float = 60.0
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A server, and a connection to it."""
    async with listening(app, stalled_reader_seconds) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        yield reader, writer
        writer.close()


async def test_a_stalled_reader_is_disconnected() -> None:
    app = Endless()
    async with listening(app, stalled_reader_seconds=0.3) as port:
        with socket.create_connection(("127.0.0.1", port)) as stalled:
            stalled.sendall(GET)
            await until(lambda: app.sent > 0 and not app.running, SECONDS)
    # More than all buffers between the two can hold.
    assert app.sent < 32 << 20


@pytest.mark.skipif(not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="the kernel keeps what it likes")
async def test_little_is_made_for_a_client_that_does_not_read() -> None:
    """A stream of small pieces goes on until all buffers between server and client are full."""
    app = Endless(piece_bytes=2000)
    async with listening(app) as port:
        with socket.socket() as stalled:
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalled.connect(("127.0.0.1", port))
            stalled.sendall(GET)
            before = -1
            while app.sent == 0 or app.sent > before:
                before = app.sent
                await asyncio.sleep(0.3)
            assert app.running == 1
        await until(lambda: not app.running, SECONDS)
    assert app.sent <= 32 << 10


async def test_a_slow_reader_is_not_disconnected() -> None:
    app = Endless()
    async with connected(app, stalled_reader_seconds=0.3) as (reader, writer):
        writer.write(GET)
        for _ in range(10):
            await reader.readexactly(1 << 20)
            await asyncio.sleep(0.05)
        assert app.running == 1
        writer.close()
        await until(lambda: not app.running, SECONDS)


async def brief(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers at once, without waiting for the rest of the body."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes = GET) -> None:
    writer.write(request)
    await reader.readuntil(b"ok")


POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"


@pytest.mark.parametrize(
    ("first", "rest"),
    [
        pytest.param(None, b"GET / HTTP/1.1\r\nhost:", id="half a first request"),
        pytest.param(GET, b"GET / HTTP/1.1\r\nhost:", id="half a request"),
        pytest.param(POST, b"half", id="half a body that nobody awaits"),
        pytest.param(POST, b"too late!", id="a whole body that nobody awaits"),
    ],
)
async def test_an_incomplete_request_is_not_waited_for(
    first: bytes | None, rest: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "HEADER_SECONDS", 0.1)
    async with connected(brief) as (reader, writer):
        if first is not None:
            await answered(reader, writer, first)
        writer.write(rest)
        async with asyncio.timeout(SECONDS):
            assert await reader.read() == b""


async def test_slow_headers_do_not_extend_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEADER_SECONDS", 0.2)
    async with connected(brief) as (reader, writer):
        await answered(reader, writer)
        async with asyncio.timeout(SECONDS):
            ended = asyncio.ensure_future(reader.read())
            while not ended.done():
                writer.write(b"G")
                await asyncio.sleep(0.05)
            with suppress(ConnectionError):  # bytes that arrived too late for the server to read
                assert await ended == b""


async def test_an_idle_connection_has_its_own_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEADER_SECONDS", 0.1)
    monkeypatch.setattr(server_module, "_KEEP_ALIVE_SECONDS", 1)
    async with connected(brief) as (reader, writer):
        for _ in range(2):
            await answered(reader, writer)
            await asyncio.sleep(0.3)
        async with asyncio.timeout(SECONDS):
            assert await reader.read() == b""


async def test_the_server_shuts_down_during_answers() -> None:
    app = Endless()
    async with connected(app) as (reader, writer):
        writer.write(GET)
        await reader.readexactly(1 << 16)
    assert not app.running


async def test_connections_above_the_limit_are_refused() -> None:
    async with listening(Endless()) as port:
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(9)]
        reader, writer = connections[-1]
        writer.write(GET)
        assert (await reader.readline()).split()[1] == b"503"
        reader, writer = connections[0]
        writer.write(GET.replace(b"/ ", b"/health ", 1))
        assert (await reader.readline()).split()[1] == b"200"
        for _, writer in connections:
            writer.close()


@pytest.mark.parametrize("value", [b"a ", b" a", b"a\nb: c", b"\x00", b"a\r"])
async def test_headers_that_cannot_be_sent_are_an_error_and_no_lost_connection(
    value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def unsendable(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", value)]})
        await send({"type": "http.response.body", "body": b"never sent"})

    async with connected(unsendable) as (reader, writer):
        for _ in range(2):  # on the same connection
            writer.write(GET)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            body = await reader.readexactly(length)
            assert head.split()[1] == b"500"
            assert b"internal error" in body
    assert "unexpected error" in caplog.text
