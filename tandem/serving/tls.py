"""TLS of a server, and warnings before its certificates expire."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryFile

import grpc

from tandem.errors import ConfigurationError
from tandem.rpc.credentials import ReloadedFile


def server_credentials(
    cert_file: Path, key_file: Path, client_ca_file: Path | None = None
) -> grpc.ServerCredentials:
    """Server credentials. Each new connection uses the files' current certificate.

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
    """Give OpenSSL, which takes no bytes, a path to them: that of a file without a name, in memory if possible."""
    with open(os.memfd_create("pem"), "w+b") if hasattr(os, "memfd_create") else TemporaryFile() as file:
        file.write(content)
        file.seek(0)  # flushes the buffer
        yield f"/dev/fd/{file.fileno()}"


logger = logging.getLogger(__name__)

WARNING_TIME = timedelta(days=14)
"""Time before its expiry at which warnings about a certificate begin. Automatic renewal replaces certificates of 90
days after two thirds of that time, so healthy ones cause no warnings."""
_DAY = timedelta(days=1)


async def watch_expiry(paths: Sequence[Path]) -> None:
    """Warn of certificates that have expired or soon will: at once, once a day, and at their expiry. Never returns."""
    while True:
        wait = warn_of_expiry(paths, datetime.now(UTC))
        await asyncio.sleep(wait.total_seconds())


def warn_of_expiry(paths: Sequence[Path], now: datetime) -> timedelta:
    """Log the warnings of this moment. Returns the time until the next look: a day, or until a certificate expires."""
    next_look = _DAY
    for path in paths:
        try:
            left = end_of(path.read_bytes(), path) - now
        except (OSError, ConfigurationError):
            continue  # using the file reports this
        has_expired = left <= timedelta()
        if not has_expired:
            next_look = min(next_look, left)
        if left <= WARNING_TIME:
            logger.log(
                logging.ERROR if has_expired else logging.WARNING,
                "certificate has expired" if has_expired else "certificate expires soon",
                extra={"file": str(path), "ends": (now + left).isoformat(), "days": left // _DAY},
            )
    return next_look


def end_of(pem: bytes, path: Path) -> datetime:
    """The moment at which the first certificate of a PEM file's chain expires.

    Raises:
        ConfigurationError: the file holds no certificate.
    """
    # Imported here, so that it is loaded only with TLS.
    from cryptography import x509

    try:
        return min(certificate.not_valid_after_utc for certificate in x509.load_pem_x509_certificates(pem))
    except ValueError:
        raise ConfigurationError(f"{path} holds no certificate; it must be PEM") from None
