"""The HTTP side put together: from the settings to a server that answers."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from functools import partial

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from coordinator.http.app import App
from coordinator.http.backend import CoordinatorBackend
from coordinator.http.bodies.held_bytes import HttpMemory
from coordinator.http.bodies.unknown_fields import HEADER, UnknownFields
from coordinator.http.server import HttpServer
from coordinator.settings.coordinator import CoordinatorSettings, origins
from tandem.rpc.addresses import is_loopback
from tandem.rpc.credentials import ReloadedFile
from tandem.serving.interceptors import ReadinessInterceptor, RunningCalls
from tandem.serving.protection import token_source
from tandem.serving.tls import server_context


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
