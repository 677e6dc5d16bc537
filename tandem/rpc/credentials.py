"""Credentials of a caller: TLS and a token, from files that are read again when they change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from tandem.errors import ConfigurationError
from tandem.rpc.addresses import Address

logger = logging.getLogger(__name__)

ValueT = TypeVar("ValueT")

# Identifies a version of a file: a renewal replaces the file, or the folder behind a link.
_Version = tuple[tuple[int, int, int], ...]


class ReloadedFile(Generic[ValueT]):
    """A value made from files, and made again when one of them has changed.

    A new version that is missing, cannot be read or makes no sense is logged once, and the last good one stays: a
    renewal is seldom atomic over two files.
    """

    def __init__(self, paths: Sequence[Path], make: Callable[[Sequence[bytes]], ValueT]) -> None:
        """Read the files for the first time.

        Args:
            paths: The files.
            make: The value, from their contents. Raises ConfigurationError when they make no sense.

        Raises:
            ConfigurationError: a file cannot be read, or `make` refuses.
        """
        self._paths = paths
        self._make = make
        try:
            self._version: _Version | None = self._look()
            self._value = self._read()
        except OSError as error:
            raise ConfigurationError(f"{error.filename} cannot be read: {_reason(error)}") from None

    @property
    def value(self) -> ValueT:
        """Current content of the files."""
        try:
            self._renew()
        except OSError as error:
            logger.warning("file not readable; the last version stays",
                           extra={"files": self._names, "error": _reason(error)})  # fmt: skip
        except ConfigurationError as error:
            logger.warning("renewed file refused; the last version stays",
                           extra={"files": self._names, "error": str(error)})  # fmt: skip
        return self._value

    def _renew(self) -> None:
        try:
            version = self._look()
        except OSError:
            if self._version is None:
                return  # it was missing before, which has been logged
            self._version = None
            raise
        if version != self._version:
            self._version = version
            self._value = self._read()
            logger.info("files renewed", extra={"files": self._names})

    @property
    def _names(self) -> str:
        return ", ".join(map(str, self._paths))

    def _look(self) -> _Version:
        stats = [path.stat() for path in self._paths]
        return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)

    def _read(self) -> ValueT:
        return self._make([path.read_bytes() for path in self._paths])


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


Metadata = tuple[tuple[str, str], ...]

AUTHORIZATION = "authorization"
"""The header that carries the token."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """How to connect to a server. Without any of these: plain text, as to a server on this machine.

    Certificates are read when a channel is opened, a token's file whenever it has changed.
    """

    ca_file: Path | None = None
    """PEM file of the accepted authorities for the server's certificate. Turns TLS on."""
    cert_file: Path | None = None
    """PEM file of our own certificate and what signed it, for a server that asks for one. Turns TLS on."""
    key_file: Path | None = None
    """PEM file of its key."""
    server_name: str = ""
    """Name that the server's certificate must have, where it is not the address's."""
    token: str = field(default="", repr=False)
    """Bearer token sent with each call."""
    token_file: Path | None = None
    """File whose first line is the token."""
    tls: bool = False
    """TLS, with the authorities that this machine trusts unless `ca_file` names others."""

    @property
    def uses_tls(self) -> bool:
        """True if the connection is encrypted, and the server's certificate checked."""
        return self.tls or self.ca_file is not None or self.cert_file is not None

    def for_address(self, origin: Address) -> Credentials:
        """These for a replica behind that address. Certificates contain the configured name, not its addresses."""
        if origin.is_name and self.uses_tls and not self.server_name:
            return replace(self, server_name=origin.host)
        return self

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Channel credentials for TLS.

        Raises:
            ConfigurationError: a file cannot be read, or only one of certificate and key was given.
        """
        if (self.cert_file is None) != (self.key_file is None):
            raise ConfigurationError(
                "a certificate was given without its key, or a key without its certificate"
            )
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca_file),
            private_key=_read(self.key_file),
            certificate_chain=_read(self.cert_file),
        )

    def files_state(self) -> tuple[object, ...]:
        """Differs once one of the files of `channel_credentials` was renewed."""
        return tuple(_state(path) for path in (self.ca_file, self.cert_file, self.key_file))

    def header(self) -> Callable[[], Metadata] | None:
        """Return a function that yields a call's metadata; None when no token is sent.

        Raises:
            ConfigurationError: the token's file cannot be read, or holds none.
        """
        if self.token_file is not None:
            reloaded = ReloadedFile(
                [self.token_file], lambda contents: first_token(contents[0], self.token_file)
            )
            return lambda: _bearer(reloaded.value)
        if self.token:
            fixed = _bearer(self.token)
            return lambda: fixed
        return None


PLAIN = Credentials()
"""Plain text and no token."""


def first_token(content: bytes, path: Path | None) -> str:
    """The token of a file: its first line that is not empty.

    Raises:
        ConfigurationError: there is none, or it holds characters that a header cannot.
    """
    lines = [line.strip() for line in content.decode("utf-8", "replace").splitlines()]
    token = next(filter(None, lines), "")
    if not is_token(token):
        raise ConfigurationError(f"{path} holds no token; its first line must be one word of visible ASCII")
    return token


def is_token(text: str) -> bool:
    """True if a text can be sent as a bearer token."""
    return bool(text) and all("!" <= character <= "~" for character in text)


def _bearer(token: str) -> Metadata:
    return ((AUTHORIZATION, f"Bearer {token}"),)


def _state(path: Path | None) -> object:
    if path is None:
        return None
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None


class AuthorizedChannel(grpc.aio.Channel):
    """A channel whose calls all carry a token.

    gRPC refuses its own call credentials on a plain connection, and its interceptors hide a stream's read and write.
    """

    def __init__(self, channel: grpc.aio.Channel, header: Callable[[], Metadata]) -> None:
        self._channel = channel
        self._header = header

    async def __aenter__(self) -> AuthorizedChannel:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *ended: Any) -> None:
        await self._channel.__aexit__(*ended)

    async def close(self, grace: float | None = None) -> None:
        """See `grpc.aio.Channel`."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """See `grpc.aio.Channel`."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See `grpc.aio.Channel`."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """See `grpc.aio.Channel`."""
        await self._channel.channel_ready()

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """See `grpc.aio.Channel`."""
        return self._authorized(self._channel.unary_unary(*arguments, **options))

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        """See `grpc.aio.Channel`."""
        return self._authorized(self._channel.unary_stream(*arguments, **options))

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        """See `grpc.aio.Channel`."""
        return self._authorized(self._channel.stream_unary(*arguments, **options))

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        """See `grpc.aio.Channel`."""
        return self._authorized(self._channel.stream_stream(*arguments, **options))

    def _authorized(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, metadata: Metadata = (), **options: Any) -> Any:
            return method(*arguments, metadata=(*metadata, *self._header()), **options)

        return call
