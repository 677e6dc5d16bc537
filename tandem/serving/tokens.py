"""Authorization: bearer tokens (RFC 6750) and the calls that they permit. Pure functions, for gRPC and HTTP alike."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tandem.errors import ConfigurationError, PermissionDeniedError, UnauthenticatedError
from tandem.rpc.credentials import is_token

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


_SCOPES = (("/grpc.health.v1.Health/", Scope.OPEN), ("/tandem.v1.AdminService/", Scope.ADMIN))


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
    """Permit or refuse a call.

    Args:
        scope: The permission that the call needs.
        authorization: The authorization header; None when there is none.
        tokens: The server's tokens.

    Raises:
        UnauthenticatedError: a token is needed, but missing or unknown.
        PermissionDeniedError: the token is a client's and the call is an admin's, or admin calls are off.
    """
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


def parse_tokens(content: bytes, source: str) -> tuple[str, ...]:
    """The tokens of a file, one on each line.

    Raises:
        ConfigurationError: the file has no token, or an invalid one. The error never contains it.
    """
    words = [line.strip() for line in content.decode("utf-8", "replace").splitlines()]
    tokens = tuple(filter(None, words))
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
    """The token of an authorization header; None when it has none."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def _is_known(presented: str | None, known: Sequence[str]) -> bool:
    """Compare a token with each known token in constant time, so that timing reveals neither a prefix nor a match."""
    digest = _digest(presented or "")
    matches = [hmac.compare_digest(digest, _digest(token)) for token in known]
    return presented is not None and any(matches)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()
