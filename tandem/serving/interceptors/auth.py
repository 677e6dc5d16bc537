"""Refuses calls without the necessary token."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from tandem.errors import PermissionDeniedError, UnauthenticatedError
from tandem.rpc.credentials import AUTHORIZATION
from tandem.serving.interceptors.handlers import Handler, Interceptor, refusing
from tandem.serving.tokens import Tokens, authorize, scope_of


class AuthInterceptor(Interceptor):
    """Holds each call to the tokens that the server knows."""

    def __init__(self, tokens: Callable[[], Tokens]) -> None:
        """Protect a server.

        Args:
            tokens: Returns the current tokens; their files may change.
        """
        self._tokens = tokens

    def before(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """The call's own handler, or one that refuses it."""
        header = next(
            (value for key, value in details.invocation_metadata or () if key == AUTHORIZATION),
            None,
        )
        try:
            authorize(
                scope_of(details.method),
                header if isinstance(header, str) else None,
                self._tokens(),
            )
        except (UnauthenticatedError, PermissionDeniedError) as error:
            return refusing(handler, error)
        return handler
