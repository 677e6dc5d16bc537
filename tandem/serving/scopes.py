"""Scopes: what services make of a caller's texts serves that caller alone.

Suffix trees, the prefix cache and compiled grammars outlive the request that they come from, and whether one of them is
there can be told from outside, by its effect on proposals or on time. So each sequence names its scope, and finds only
what sequences of this scope have left.

A scope is a keyed hash of who asks. Services learn no token from it, and whoever reaches a service without being its
coordinator cannot name the scope of anybody: it is as hard to guess as a token.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from tandem.rpc.credentials import PLAIN, Credentials

MAX_SCOPE_LENGTH = 64
"""Characters of a scope that a service takes: it keeps them for as long as what was made in the scope."""
MAX_SALT_LENGTH = 256
"""Characters of a request's `cache_salt`. vLLM recommends 43: 256 bits in base64."""

SUFFIX = "suffix"
PREFIX = "prefix"
SHAREABLE = (SUFFIX, PREFIX)


def kinds_of(text: str | None) -> list[str]:
    """The kinds of state in an option's text, which has commas between them."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _check_kinds(text: str) -> str:
    kinds = kinds_of(text)
    if unknown := [kind for kind in kinds if kind not in SHAREABLE]:
        raise ValueError(f"names {unknown[0]!r}; it must be {' or '.join(SHAREABLE)}, or both with a comma")
    return ",".join(kinds)


def _one_text(value: object) -> object:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


SharedKinds = Annotated[str, BeforeValidator(_one_text), AfterValidator(_check_kinds)]
"""Kinds of state that callers share, with commas between them."""


@dataclass(frozen=True, slots=True)
class RequestScopes:
    """The scopes of a request's sequences, by the state that a service keeps. Empty: the sequence is alone."""

    prefix: str = ""
    """For services with a model: prefix cache and compiled grammars."""
    suffix: str = ""
    """For drafts without one: earlier answers."""


class CallerScopes:
    """Knows the scopes of callers."""

    def __init__(self, services: Credentials = PLAIN, shared: Collection[str] = ()) -> None:
        """`services` are the credentials for the services, `shared` the kinds of state that all callers share."""
        self._own_key = secrets.token_bytes(32)
        self._service_token = services.header()
        self._shared = frozenset(shared)

    def of(self, *, token: str = "", address: str = "", salt: str | None = None) -> RequestScopes:
        """The scopes of a request, by the token of its caller, else by the caller's address, and by the request's salt.

        A request of which neither is known is alone.
        """
        prefix = suffix = ""
        if token:
            prefix = suffix = _name_scope(self._common_key(), "token", token, salt)
        elif address:
            # Each coordinator may have a client of its own at one address: that of the loopback, for instance.
            prefix = suffix = _name_scope(self._own_key, "address", address, salt)
        else:
            # Not none: a sequence that has to begin again finds its own blocks.
            prefix = secrets.token_hex(16)
        if PREFIX in self._shared:
            prefix = _name_scope(self._common_key(), "shared", PREFIX, salt)
        if SUFFIX in self._shared:
            suffix = _name_scope(self._common_key(), "shared", SUFFIX, salt)
        return RequestScopes(prefix, suffix)

    def _common_key(self) -> bytes:
        """The key of all coordinators that have the same token for the services, so that they agree on a caller's
        scope; without such a token the coordinator's own."""
        if self._service_token is None:
            return self._own_key
        ((_, bearer),) = self._service_token()
        return bearer.encode()


def _name_scope(key: bytes, kind: str, name: str, salt: str | None) -> str:
    message = json.dumps([kind, name, salt]).encode()
    return hmac.digest(key, message, "sha256").hex()[:32]
