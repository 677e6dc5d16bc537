"""Runs the HTTP side in the coordinator's own event loop, and ends it with the coordinator."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from coordinator.http.app import App, CoordinatorBackend
from coordinator.http.bodies import HEADER, HttpMemory, UnknownFields
from coordinator.settings.coordinator import CoordinatorSettings, origins
from tandem.errors import ConfigurationError
from tandem.rpc.addresses import is_loopback
from tandem.rpc.credentials import ReloadedFile
from tandem.serving.interceptors import ReadinessInterceptor, RunningCalls
from tandem.serving.protection import token_source
from tandem.serving.tls import server_context

# How long a client may take from connecting, or from the first byte after an answer, to the end of a request's headers.
_HEADER_SECONDS = 30.0
_KEEP_ALIVE_SECONDS = 75
_MAX_HEADER_BYTES = 64 << 10
# Bounds on the bytes of an answer that a client does not read, in the kernel and here. The kernel doubles its number.
# By default it buffers megabytes, so that a completion would run to its end without a reader.
_SEND_BUFFER_BYTES = 32 << 10
_WRITE_BUFFER_BYTES = 4 << 10
# Bytes in the kernel's buffer that a client which does not read keeps from being sent; bytes on their way to another
# client have the rest. A stream of 2 kB for each token, with its logprobs, stalls after 11 tokens; it was 36.
_UNSENT_BYTES = 8 << 10
_UNSENT_OPTION: int | None = getattr(socket, "TCP_NOTSENT_LOWAT", None)
# How long connections may take to close once nothing runs on them.
_GOODBYE_SECONDS = 0.5


class HttpServer:
    """Listens from the start; the application answers every request."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        most_connections: int,
        stalled_reader_seconds: float,
        tls: ssl.SSLContext | None = None,
        listening: socket.socket | None = None,
    ) -> None:
        """Bind the address, unless a listening socket is given: processes that share a port share the socket.

        Raises:
            ConfigurationError: it cannot be bound.
        """
        self._socket = listening or bound_socket(host, port)
        self.address = _spelled(self._socket, host)
        """host:port that it listens on."""
        self.url = f"{'http' if tls is None else 'https'}://{self.address}"
        config = uvicorn.Config(
            app,
            http=_protocol(stalled_reader_seconds),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=most_connections,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        )
        config.load()
        config.ssl = tls
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to answer."""
        self._serving = asyncio.create_task(self._server.serve([self._socket]))

    async def close(self) -> None:
        """Stop answering, and close all connections. Called once no request runs."""
        if self._serving is None:
            self._socket.close()
            return
        running = list(self._server.server_state.tasks)
        for task in running:
            task.cancel()
        self._server.should_exit = True
        try:
            async with asyncio.timeout(_GOODBYE_SECONDS):
                await asyncio.shield(self._serving)
        except TimeoutError:
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
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._stalled)
        _cancel(self._silent)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Called for received data, and for data that was waiting when an answer ends."""
        super().handle_events()
        if self._answers:
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

    @property
    def _answers(self) -> bool:
        cycle = getattr(self, "cycle", None)  # its type says that there always is one
        return cycle is not None and not cycle.response_complete

    def _await_request(self) -> None:
        if self._silent is None:
            self._silent = self.loop.call_later(_HEADER_SECONDS, self.transport.close)


def _protocol(seconds: float) -> type[_Bounded]:
    """A protocol class with the timeout bound in, since uvicorn passes no arguments."""

    class Bounded(_Bounded):
        stalled_reader_seconds = seconds

    return Bounded


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that listens for HTTP.

    Raises:
        ConfigurationError: the address cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Connections have it from here.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            if _UNSENT_OPTION is not None:
                bound.setsockopt(socket.IPPROTO_TCP, _UNSENT_OPTION, _UNSENT_BYTES)
            bound.bind(address)
            bound.listen(socket.SOMAXCONN)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}; "
            "choose another address with --http-host and --http-port"
        ) from None
    bound.setblocking(False)
    return bound


def _spelled(bound: socket.socket, host: str) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"{name}:{bound.getsockname()[1]}"


class HttpSide:
    """The coordinator over HTTP."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        backend: CoordinatorBackend,
        readiness: ReadinessInterceptor,
        calls: RunningCalls,
        listening: socket.socket | None = None,
    ) -> None:
        """Bind the address, and read the certificate.

        Raises:
            ConfigurationError: the address cannot be bound, or a file cannot be read.
        """
        assert settings.http_port is not None
        app = App(
            backend,
            readiness,
            calls,
            token_source(settings, settings.http_host),
            settings.served_model_name,
            HttpMemory.of(settings),
            unknown_fields=UnknownFields(settings.unknown_fields),
            local_only=is_loopback(settings.http_host) and not settings.knows_callers,
        )
        self._server = HttpServer(
            _with_cors(app, origins(settings.cors_origin)),
            settings.http_host,
            settings.http_port,
            most_connections=settings.http_max_connections,
            stalled_reader_seconds=settings.stalled_reader_timeout_seconds,
            tls=_reloaded_context(settings),
            listening=listening,
        )

    @property
    def url(self) -> str:
        """Its address."""
        return self._server.url

    def start(self) -> None:
        """Begin to answer, if only that the coordinator is still starting."""
        self._server.start()

    async def close(self) -> None:
        """Answer no more."""
        await self._server.close()


def _with_cors(app: ASGIApp, allowed: Sequence[str]) -> ASGIApp:
    """The same, also for web pages of these origins."""
    if not allowed:
        return app
    exposed = [HEADER, "Retry-After", "Retry-After-Ms"]
    return CORSMiddleware(
        app, allow_origins=allowed, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=exposed
    )


def _reloaded_context(settings: CoordinatorSettings) -> ssl.SSLContext | None:
    """TLS with the certificate that the files hold by the time of each handshake; None without TLS."""
    cert, key, client_ca = settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file
    if cert is None or key is None:
        return None
    paths = [cert, key, *([] if client_ca is None else [client_ca])]
    reloaded = ReloadedFile(paths, partial(server_context, paths))
    context = reloaded.value

    def renew(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = reloaded.value

    context.sni_callback = renew  # called for each handshake, with a name or without
    return context
