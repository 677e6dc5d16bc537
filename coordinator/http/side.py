"""The HTTP side put together: from the settings to a server that answers."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from coordinator.http.app import App
from coordinator.http.backend import CoordinatorBackend
from coordinator.http.chat_template import read_chat_template
from coordinator.http.server import HttpServer
from coordinator.settings import CoordinatorSettings
from tandem.errors import ConfigurationError
from tandem.files import Renewed
from tandem.serving.calls import RunningCalls
from tandem.serving.gate import Gate
from tandem.serving.protection import is_loopback, token_source
from tandem.serving.tls import server_context


class HttpSide:
    """The coordinator over HTTP."""

    def __init__(
        self, settings: CoordinatorSettings, backend: CoordinatorBackend, gate: Gate, calls: RunningCalls
    ) -> None:
        """Bind the address, and read what is given in files.

        Raises:
            ConfigurationError: the address cannot be bound, or a file cannot be read.
        """
        assert settings.http_port is not None
        self._backend = backend
        self._template = None if settings.chat_template is None else _read(settings.chat_template)
        app = App(
            backend,
            gate,
            calls,
            token_source(settings, settings.http_host),
            settings.served_model_name,
            settings.http_max_body_bytes,
            local_only=is_loopback(settings.http_host) and not settings.knows_callers,
        )
        self._server = HttpServer(
            app,
            settings.http_host,
            settings.http_port,
            most_connections=settings.http_max_connections,
            stalled_reader_seconds=settings.stalled_reader_timeout_seconds,
            tls=_renewed_context(settings),
        )

    @property
    def url(self) -> str:
        """Where it answers."""
        return self._server.url

    def start(self) -> None:
        """Begin to answer, if only that the coordinator is still starting."""
        self._server.start()

    def meet(self, tokenizer_files: Mapping[str, bytes]) -> None:
        """Read how the target's model makes prompts of chats.

        Raises:
            ConfigurationError: its template is none.
        """
        self._backend.chat_template = read_chat_template(tokenizer_files, self._template)

    async def close(self) -> None:
        """Answer no more."""
        await self._server.close()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--chat-template {path} cannot be read as UTF-8 text: {error}") from None


def _renewed_context(settings: CoordinatorSettings) -> ssl.SSLContext | None:
    """TLS with the certificate that the files hold by the time of each handshake; None without TLS."""
    cert, key, client_ca = settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file
    if cert is None or key is None:
        return None
    paths = [cert, key, *([] if client_ca is None else [client_ca])]
    renewed = Renewed(paths, partial(server_context, paths))
    context = renewed.value

    def renew(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = renewed.value

    context.sni_callback = renew  # called for each handshake, with a name or without
    return context
