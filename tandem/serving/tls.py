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
from tandem.files import Renewed


def server_credentials(
    cert_file: Path, key_file: Path, client_ca_file: Path | None = None
) -> grpc.ServerCredentials:
    """What a gRPC server listens with. Each new connection gets the certificate that the files hold by then.

    Args:
        cert_file: PEM file of the server's certificate and what signed it.
        key_file: PEM file of its key.
        client_ca_file: PEM file of the authorities that a client's certificate must come from; None asks for none.

    Raises:
        ConfigurationError: a file cannot be read, or they make no sense together.
    """

    def configuration(contents: Sequence[bytes]) -> grpc.ServerCertificateConfiguration:
        server_context(paths, contents)  # gRPC itself would only fail each handshake
        cert, key, *client_ca = contents
        return grpc.ssl_server_certificate_configuration([(key, cert)], *client_ca)

    paths = [cert_file, key_file, *([] if client_ca_file is None else [client_ca_file])]
    renewed = Renewed(paths, configuration)
    first = served = renewed.value
    lock = threading.Lock()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        # Called by gRPC's own threads before each handshake; None keeps what there is.
        nonlocal served
        with lock:
            if renewed.value is served:
                return None
            served = renewed.value
            return served

    return grpc.dynamic_ssl_server_credentials(
        first,
        fetch,  # type: ignore[arg-type] # the stubs do not know that None is allowed
        require_client_authentication=client_ca_file is not None,
    )


def server_context(paths: Sequence[Path], contents: Sequence[bytes]) -> ssl.SSLContext:
    """The same for a server that speaks through Python's own TLS, as of now.

    Args:
        paths: The files of certificate and key, and that of the clients' authorities where there is one.
        contents: What was read from them; they may have been renewed since.

    Raises:
        ConfigurationError: the contents make no sense together.
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
        file.seek(0)  # which writes out what is buffered
        yield f"/dev/fd/{file.fileno()}"


def _file_without_a_name() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("pem"), "w+b")
    return TemporaryFile()
