"""Credentials of a caller: TLS and a token, from files that are read again when they change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from tandem.errors import ConfigurationError
from tandem.rpc.addresses import Address

logger = logging.getLogger(__name__)

ValueT = TypeVar("ValueT")

_Version = tuple[int, int, int]


def _version(path: Path) -> _Version:
    """Identifies a version of a file: a renewal replaces the file, or the folder behind a link."""
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


class ReloadedFile(Generic[ValueT]):
    """A value made from files, and made again when one of them has changed.

    A new version that is missing, cannot be read or makes no sense is logged once, and the last good one stays: a
    renewal is seldom atomic over two files.
    """

    def __init__(self, paths: Sequence[Path], make: Callable[[Sequence[bytes]], ValueT]) -> None:
        """`make` makes the value of the files' contents. It raises ConfigurationError when they make no sense."""
        self._paths = paths
        self._names = ", ".join(map(str, paths))
        self._make = make
        try:
            self._versions: list[_Version] | None = self._look()
            self._value = self._read()
        except OSError as error:
            raise _unreadable(error) from None

    @property
    def value(self) -> ValueT:
        """Current content of the files."""
        known = self._versions
        self._versions = None
        try:
            self._versions = self._look()
            if self._versions != known:
                self._value = self._read()
                logger.info("files renewed", extra={"files": self._names})
        except ConfigurationError as error:
            extra = {"files": self._names, "error": str(error)}
            logger.warning("renewed file refused; the last version stays", extra=extra)
        except OSError as error:
            if known is not None or self._versions is not None:  # else that was logged when it went missing
                extra = {"files": self._names, "error": _reason(error)}
                logger.warning("file not readable; the last version stays", extra=extra)
        return self._value

    def _look(self) -> list[_Version]:
        return [_version(path) for path in self._paths]

    def _read(self) -> ValueT:
        return self._make([path.read_bytes() for path in self._paths])


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()


def _unreadable(error: OSError) -> ConfigurationError:
    return ConfigurationError(f"{error.filename} cannot be read: {_reason(error)}")


Metadata = tuple[tuple[str, str], ...]

AUTHORIZATION = "authorization"


@dataclass(frozen=True, slots=True)
class Credentials:
    """TLS and token for a connection. Without any of these: plain text, as to a server on this machine.

    Certificates are read when a channel is opened, a token's file whenever it has changed.
    """

    ca_file: Path | None = None
    """PEM file of the accepted authorities for the server's certificate. Turns TLS on."""
    cert_file: Path | None = None
    """PEM file of our own certificate and what signed it, for a server that asks for one. Turns TLS on."""
    key_file: Path | None = None
    """PEM file of the key of our own certificate."""
    server_name: str = ""
    """Name that the server's certificate must have, where it is not the address's."""
    token: str = field(default="", repr=False)
    """Bearer token sent with each call."""
    token_file: Path | None = None
    """File whose first line is the token."""
    tls: bool = False
    """TLS, with the authorities that this machine trusts unless `ca_file` names others."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Credentials:
        """The credentials that options name: `tls`, `tls_ca_file` and so on, `token`, `token_file`. None is unset."""
        given: dict[str, Any] = {}
        for each in fields(cls):
            value = options.get(f"tls_{each.name}", options.get(each.name))
            if value is not None:
                given[each.name] = Path(value).expanduser() if each.name.endswith("_file") else value
        return cls(**given)

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
        versions: list[object] = []
        for path in (self.ca_file, self.cert_file, self.key_file):
            with suppress(OSError):
                versions.append(path and _version(path))
        return tuple(versions)

    def header(self) -> Callable[[], Metadata] | None:
        """Return a function that yields a call's metadata; None when no token is sent."""
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
    """The token of a file: its first line that is not empty."""
    token = next(lines_of(content), "")
    if not is_token(token):
        raise ConfigurationError(f"{path} holds no token; its first line must be one word of visible ASCII")
    return token


def lines_of(content: bytes) -> Iterator[str]:
    """The lines of a file that are not empty, without white space around them."""
    return filter(None, map(str.strip, content.decode("utf-8", "replace").splitlines()))


def is_token(text: str) -> bool:
    """True if a text can be sent as a bearer token."""
    return bool(text) and all("!" <= character <= "~" for character in text)


def _bearer(token: str) -> Metadata:
    return ((AUTHORIZATION, f"Bearer {token}"),)


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(error) from None


def attach_token(channel: grpc.aio.Channel | grpc.Channel, header: Callable[[], Metadata]) -> None:
    """Have all calls of a channel carry a token.

    gRPC refuses its own call credentials on a plain connection, and its interceptors hide a stream's read and write.
    """

    def authorize(make: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
        def make_authorized(*arguments: Any, **options: Any) -> Callable[..., Any]:
            method = make(*arguments, **options)

            def call(*arguments: Any, metadata: Metadata = (), **options: Any) -> Any:
                return method(*arguments, metadata=(*metadata, *header()), **options)

            return call

        return make_authorized

    for name in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        setattr(channel, name, authorize(getattr(channel, name)))
