"""Runs the HTTP side in the coordinator's own event loop, and ends it with the coordinator."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from tandem.errors import ServiceUnavailableError
from tandem.rpc.credentials import ReloadedFile
from tandem.serving.protection import server_context
from tandem.serving.server import GOODBYE_SECONDS, bound_socket
from tandem_coordinator.http.app import HEALTH_PATHS
from tandem_coordinator.http.bodies import BODY_SECONDS
from tandem_coordinator.http.errors import error_response
from tandem_coordinator.http.headers import ALONE_HEADER, IGNORED_HEADER, with_sendable_headers
from tandem_coordinator.settings.coordinator import CoordinatorSettings, split_entries

HEADER_SECONDS = BODY_SECONDS
"""Time of a client from connecting, or from the first byte after an answer, to the end of a request's headers."""
# nginx's default.
_KEEP_ALIVE_SECONDS = 75
# h11's own bound is 16 KiB; browsers send cookies of other servers on this machine.
_MAX_HEADER_BYTES = 64 << 10
# Bounds on the bytes of an answer that a client does not read, in the kernel and here. The kernel doubles its number.
# By default it buffers megabytes, so that a completion would run to its end without a reader.
_SEND_BUFFER_BYTES = 32 << 10
# Bytes in the kernel's buffer that a client which does not read keeps from being sent; bytes on their way to another
# client have the rest. A stream of 2 kB for each token, with its logprobs, stalls after 11 tokens; it was 36.
_UNSENT_BYTES = 8 << 10


class HttpServer:
    """Listens from the start; the application answers every request."""

    def __init__(self, settings: CoordinatorSettings, app: ASGIApp) -> None:
        """Bind the address of the settings."""
        assert settings.http_port is not None
        tls = _make_context(settings)
        host = settings.http_host
        self._socket = _listening_socket(host, settings.http_port)
        name = f"[{host}]" if ":" in host else host
        self.url = f"{'http' if tls is None else 'https'}://{name}:{self._socket.getsockname()[1]}"
        self._app = app
        self._max_connections = settings.http_max_connections
        served: ASGIApp = self
        if allowed := split_entries(settings.cors_origin):
            exposed = [IGNORED_HEADER, ALONE_HEADER, "Retry-After", "Retry-After-Ms", "X-Request-Id"]
            served = CORSMiddleware(
                self, allowed, ["GET", "POST"], allow_headers=["*"], expose_headers=exposed
            )
        # uvicorn passes no arguments to a protocol.
        bounds = {"stalled_reader_seconds": settings.stalled_reader_timeout_seconds}
        config = uvicorn.Config(
            with_sendable_headers(served),
            http=type("Bounded", (_Bounded,), bounds),
            ws="none",  # the application knows HTTP only
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        )
        config.load()
        config.ssl = tls
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application behind the bound on connections, which probes of health pass."""
        most = self._max_connections
        is_full = len(self._server.server_state.connections) > most
        if is_full and scope["path"] not in HEALTH_PATHS:
            sentence = f"more than {most} connections are open, which is the maximum; try again later"
            await error_response(ServiceUnavailableError(sentence), scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def start(self) -> None:
        self._serving = asyncio.create_task(self._server.serve([self._socket]))

    async def close(self) -> None:
        """Stop answering, and close all connections. Called once no request runs."""
        if self._serving is None:
            self._socket.close()
            return
        for task in list(self._server.server_state.tasks):
            task.cancel()
        self._server.should_exit = True
        await asyncio.wait({self._serving}, timeout=GOODBYE_SECONDS)
        self._server.force_exit = True
        await self._serving


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the coordinator's own business."""
        yield


class _Bounded(H11Protocol):
    """HTTP/1.1 whose connections end when their client does not read, or sends no request."""

    stalled_reader_seconds: float
    _stalled: asyncio.TimerHandle | None = None
    _silent: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_SEND_BUFFER_BYTES // 8)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._stalled)
        _cancel(self._silent)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Called for received data, and for data that was waiting when an answer ends."""
        super().handle_events()
        cycle = getattr(self, "cycle", None)  # its type says that there always is one
        if cycle is not None and not cycle.response_complete:
            _cancel(self._silent)
            self._silent = None
        elif self.timeout_keep_alive_task is None:
            # Any data ends the keep-alive's timer, even half a request or the rest of an earlier body.
            self._await_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self.stalled_reader_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._stalled)

    def _await_request(self) -> None:
        if self._silent is None:
            self._silent = self.loop.call_later(HEADER_SECONDS, self.transport.close)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens for HTTP."""
    bound = bound_socket(host, port, "--http-host and --http-port")
    # Connections have these from here.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    bound.listen(socket.SOMAXCONN)
    bound.setblocking(False)
    return bound


def _make_context(settings: CoordinatorSettings) -> ssl.SSLContext | None:
    """TLS with the certificate that the files hold by the time of each handshake; None without TLS."""
    cert = settings.tls_cert_file
    key = settings.tls_key_file
    client_ca = settings.tls_client_ca_file
    if cert is None or key is None:
        return None
    paths = [cert, key, *([] if client_ca is None else [client_ca])]
    reloaded = ReloadedFile(paths, partial(server_context, paths))
    context = reloaded.value

    def renew(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = reloaded.value

    context.sni_callback = renew  # called for each handshake, with a name or without
    return context
