"""The server's end of TLS, with certificates that are renewed while it runs."""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import grpc

from tandem.errors import ConfigurationError
from tandem.rpc.reloaded_files import ReloadedFile


def server_credentials(
    cert_file: Path, key_file: Path, client_ca_file: Path | None = None
) -> grpc.ServerCredentials:
    """Server credentials. Each new connection uses the files' current certificate.

    Args:
        cert_file: PEM file of the server's certificate and its chain.
        key_file: PEM file of its key.
        client_ca_file: PEM file of the accepted authorities for clients' certificates; None: clients need none.

    Raises:
        ConfigurationError: a file cannot be read, or the files do not match.
    """

    def configuration(contents: Sequence[bytes]) -> grpc.ServerCertificateConfiguration:
        server_context(paths, contents)  # gRPC itself would only fail each handshake
        cert, key, *client_ca = contents
        return grpc.ssl_server_certificate_configuration([(key, cert)], *client_ca)

    paths = [cert_file, key_file, *([] if client_ca_file is None else [client_ca_file])]
    reloaded = ReloadedFile(paths, configuration)
    first = served = reloaded.value
    lock = threading.Lock()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        # Called by gRPC's own threads before each handshake; None keeps what there is.
        nonlocal served
        with lock:
            if reloaded.value is served:
                return None
            served = reloaded.value
            return served

    return grpc.dynamic_ssl_server_credentials(
        first,
        fetch,  # type: ignore[arg-type] # the stubs do not know that None is allowed
        require_client_authentication=client_ca_file is not None,
    )


def server_context(paths: Sequence[Path], contents: Sequence[bytes]) -> ssl.SSLContext:
    """TLS context for a server with Python's own TLS, from the current files.

    Args:
        paths: The files of certificate and key, and that of the clients' authorities where there is one.
        contents: Their contents when they were read; they may have changed since.

    Raises:
        ConfigurationError: the contents do not match.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    with ExitStack() as files:
        cert, key, *client_ca = [files.enter_context(_openable(content)) for content in contents]
        try:
            # Without a password of our own making OpenSSL would ask the terminal for one.
            context.load_cert_chain(cert, key, password=lambda: "-")
        except (ssl.SSLError, ValueError):
            raise ConfigurationError(
                f"{paths[0]} and {paths[1]} are not a certificate and its key; both must be PEM, unencrypted, "
                "and belong together"
            ) from None
        for file in client_ca:
            try:
                context.load_verify_locations(file)
            except (ssl.SSLError, ValueError):
                raise ConfigurationError(f"{paths[2]} holds no certificate; it must be PEM") from None
            context.verify_mode = ssl.CERT_REQUIRED
    return context


@contextmanager
def _openable(content: bytes) -> Iterator[str]:
    """A path under which OpenSSL, which takes no bytes, finds these: a file without a name, in memory if it can."""
    with _file_without_a_name() as file:
        file.write(content)
        file.seek(0)  # flushes the buffer
        yield f"/dev/fd/{file.fileno()}"


def _file_without_a_name() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("pem"), "w+b")
    return TemporaryFile()
