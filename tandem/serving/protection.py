"""Protection of a server: its tokens, its TLS with warnings before certificates expire, and their options and rules."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any, ClassVar

import grpc
from pydantic import SecretStr

from tandem.config.options import SHORT_HELP, Options
from tandem.config.rule import Rule, Rules, rule
from tandem.errors import ConfigurationError, PermissionDeniedError, UnauthenticatedError
from tandem.rpc.addresses import is_loopback
from tandem.rpc.credentials import ReloadedFile, is_token, lines_of

logger = logging.getLogger(__name__)

MIN_TOKEN_LENGTH = 16
"""Characters. Shorter ones are guessed."""


class Scope(Enum):
    """Scope that a method requires of its caller."""

    OPEN = "open"
    """No requirement: a load balancer asks for health and has no token."""
    CLIENT = "client"
    """One of the client tokens, or of the admin tokens."""
    ADMIN = "admin"
    """One of the admin tokens."""


_SCOPES = (
    ("/grpc.health.v1.Health/", Scope.OPEN),
    ("/tandem.v1.AdminService/", Scope.ADMIN),
    ("/tandem.v1.WeightsService/", Scope.ADMIN),
)


@dataclass(frozen=True, slots=True, repr=False)
class Tokens:
    """The tokens that a server knows."""

    client: tuple[str, ...] = ()
    """Any of these; none: clients need no token."""
    admin: tuple[str, ...] = ()
    admin_needs_token: bool = True
    """True if admin calls are refused when there is no admin token."""


def scope_of(method: str) -> Scope:
    """Scope that a gRPC method, named by its path, requires of its caller."""
    return next((scope for prefix, scope in _SCOPES if method.startswith(prefix)), Scope.CLIENT)


def authorize(scope: Scope, authorization: str | None, tokens: Tokens) -> None:
    """Permit or refuse a call."""
    if scope is Scope.OPEN:
        return
    is_admin = scope is Scope.ADMIN
    needed = tokens.admin if is_admin else tokens.client
    if is_admin and not needed and tokens.admin_needs_token:
        raise PermissionDeniedError(
            "admin calls are off: this server has no admin token; give it one with admin_token_file"
        )
    presented = _bearer(authorization)
    if not needed or _is_known(presented, tokens.admin + needed):
        return
    if is_admin and _is_known(presented, tokens.client):
        raise PermissionDeniedError("the call's token is a client's; an admin call needs an admin token")
    raise UnauthenticatedError(
        "the call has no token; it must have the header authorization: Bearer TOKEN"
        if presented is None
        else "the call's token is not known; it must be one that the server was given"
    )


def caller_token(authorization: str | None, tokens: Tokens) -> str:
    """The token by which an authorized caller is known; empty where callers need none, and may send any."""
    return (_bearer(authorization) or "") if tokens.client else ""


def parse_tokens(content: bytes, source: str) -> tuple[str, ...]:
    """The tokens of a file, one on each line. An error never contains one."""
    tokens = tuple(lines_of(content))
    if not tokens:
        raise ConfigurationError(f"{source} holds no token; it must hold one on each line")
    for problem in filter(None, map(token_problem, tokens)):
        raise ConfigurationError(f"{source} holds a token that {problem}")
    return tokens


def token_problem(token: str) -> str:
    """Reason why a token cannot be used, without quoting it; empty when it can."""
    if not is_token(token):
        return "is not one word of visible ASCII, as a header must be"
    if len(token) < MIN_TOKEN_LENGTH:
        return f"has {len(token)} characters; it must have at least {MIN_TOKEN_LENGTH}"
    return ""


def _bearer(authorization: str | None) -> str | None:
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def _is_known(presented: str | None, known: Sequence[str]) -> bool:
    """Compare a token with each known token in constant time, so that timing reveals neither a prefix nor a match."""
    digest = _digest(presented or "")
    matches = [hmac.compare_digest(digest, _digest(token)) for token in known]
    return presented is not None and any(matches)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def _token_rule(option: str) -> Rule[Any]:
    file = f"{option}_file"

    def check(options: Any) -> Iterator[str]:
        token = getattr(options, option)
        if token is None:
            return
        if getattr(options, file) is not None:
            yield f"{option} and {file} are both set; give one of them"
        if problem := token_problem(token.get_secret_value()):
            yield f"{option} {problem}"

    return Rule(
        option.replace("_", "-"),
        f"`{option}` is a word of at least {MIN_TOKEN_LENGTH} visible ASCII characters, and not set beside `{file}`.",
        check,
    )


@rule("`tls_cert_file` and `tls_key_file` are set together, and `tls_client_ca_file` only with them.")
def _tls_files(options: ProtectionOptions) -> Iterator[str]:
    missing = [name for name in ("tls_cert_file", "tls_key_file") if getattr(options, name) is None]
    if len(missing) == 1:
        yield f"{missing[0]} is not set; a certificate needs its key, and a key its certificate"
    if len(missing) == 2 and options.tls_client_ca_file is not None:
        yield "tls_client_ca_file is set; it needs tls_cert_file and tls_key_file"


class ProtectionOptions(Options):
    """TLS and tokens of a server."""

    tls_cert_file: Annotated[Path | None, SHORT_HELP] = None
    """PEM file of the server's certificate; turns TLS on, with tls_key_file. The certificates that signed it follow in
    the file. Read again when it changes."""
    tls_key_file: Annotated[Path | None, SHORT_HELP] = None
    """PEM file of the server's key, unencrypted."""
    tls_client_ca_file: Path | None = None
    """PEM file of the accepted authorities for callers' certificates (mutual TLS). By default callers need no
    certificate."""
    auth_token: SecretStr | None = None
    """Bearer token that callers must have. Any user of the machine can read a command line: better in the environment,
    or in auth_token_file."""
    auth_token_file: Annotated[Path | None, SHORT_HELP] = None
    """File of bearer tokens, one on each line; callers must have one of them. Read again when it changes."""
    insecure: Annotated[bool, SHORT_HELP] = False
    """Allow other machines without TLS or without tokens; for a network where everyone is trusted. A certificate
    stands for a token."""

    own_rules: ClassVar[Rules] = (_tls_files, _token_rule("auth_token"))

    @property
    def uses_tls(self) -> bool:
        return self.tls_cert_file is not None

    @property
    def certificate_files(self) -> tuple[Path, ...]:
        """Files of certificates that the process needs, which must not expire."""
        return tuple(path for path in (self.tls_cert_file, self.tls_client_ca_file) if path is not None)

    @property
    def knows_callers(self) -> bool:
        return any(
            each is not None for each in (self.tls_client_ca_file, self.auth_token, self.auth_token_file)
        )


class AdminOptions(ProtectionOptions):
    """Options of a server that has admin calls."""

    admin_token: SecretStr | None = None
    """Bearer token for admin calls, which opens all other calls too. Better in the environment or in admin_token_file.
    Without one, admin calls are open to this machine alone, and only while clients need no token either."""
    admin_token_file: Path | None = None
    """File of admin tokens, one on each line, all of them valid. Read again when it changes."""

    own_rules: ClassVar[Rules] = (_token_rule("admin_token"),)


class ServiceAdminOptions(ProtectionOptions):
    """Options of a service whose model can be changed while it runs."""

    admin_token: SecretStr | None = None
    """Bearer token for calls that replace weights or let the service sleep: a role apart from that of coordinators,
    whose tokens do not permit them. Better in the environment or in admin_token_file. Without one these calls are
    off."""
    admin_token_file: Path | None = None
    """File of admin tokens, one on each line, all of them valid. Read again when it changes."""
    weights_root: Path | None = None
    """Folder below which weights must lie that admin calls load. By default none are loaded."""

    own_rules: ClassVar[Rules] = (_token_rule("admin_token"),)


def token_source(options: ProtectionOptions, host: str) -> Callable[[], Tokens]:
    """The current tokens of a server."""
    client = tokens_of(options.auth_token, options.auth_token_file)
    admin = tokens_of(None, None)
    if isinstance(options, AdminOptions | ServiceAdminOptions):
        admin = tokens_of(options.admin_token, options.admin_token_file)
    may_be_open = not isinstance(options, ServiceAdminOptions)
    is_shut = not (may_be_open and is_loopback(host) and not options.knows_callers)
    return lambda: Tokens(client(), admin(), is_shut)


def exposure_rule(host: str, *port: str) -> Rule[Any]:
    """The rule that a server which others reach is protected, by the option of its address, and by that of its port
    where it is off without one."""

    def check(options: Any) -> Iterator[str]:
        address = getattr(options, host)
        is_off = any(getattr(options, each) is None for each in port)
        if is_off or is_loopback(address) or options.insecure or (options.uses_tls and options.knows_callers):
            return
        missing = [
            *([] if options.uses_tls else ["tls_cert_file and tls_key_file"]),
            *([] if options.knows_callers else ["auth_token_file or tls_client_ca_file"]),
        ]
        yield (
            f"{host} is {address}, which other machines reach, and the server is not protected: "
            f"give {', and '.join(missing)}; "
            "or insecure, where the network is trusted"
        )

    requirement = (
        f"When other machines reach `{host}`, the server has TLS and asks who calls, or is `insecure`."
    )
    return Rule(f"{host.replace('_', '-')}-exposure", requirement, check)


def tokens_of(token: SecretStr | None, file: Path | None) -> Callable[[], tuple[str, ...]]:
    """The current tokens of an option or its file; none when neither is set."""
    if file is not None:
        reloaded = ReloadedFile([file], lambda contents: parse_tokens(contents[0], str(file)))
        return lambda: reloaded.value
    fixed = () if token is None else (token.get_secret_value(),)
    return lambda: fixed


def server_credentials(
    cert_file: Path, key_file: Path, client_ca_file: Path | None = None
) -> grpc.ServerCredentials:
    """Server credentials. Each new connection uses the files' current certificate."""

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
    """TLS context for a server with Python's own TLS, from the files of certificate and key, and that of the clients'
    authorities where there is one. `contents` are theirs when they were read; they may have changed since."""
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
        # Imported here, so that it is loaded only with TLS.
        from cryptography import x509

        try:
            chain = x509.load_pem_x509_certificates(path.read_bytes())
            left = min(certificate.not_valid_after_utc for certificate in chain) - now
        except (OSError, ValueError):
            continue  # using the file reports this
        event = (logging.WARNING, "certificate expires soon")
        if left <= timedelta():
            event = (logging.ERROR, "certificate has expired")
        else:
            next_look = min(next_look, left)
        if left <= WARNING_TIME:
            logger.log(
                *event, extra={"file": str(path), "ends": (now + left).isoformat(), "days": left // _DAY}
            )
    return next_look
