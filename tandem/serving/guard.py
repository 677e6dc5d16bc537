"""Refuses calls whose caller may not make them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc
import grpc.aio

from tandem.credentials import AUTHORIZATION
from tandem.errors import PermissionDeniedError, UnauthenticatedError
from tandem.serving.edge import Handler
from tandem.serving.gate import refusing
from tandem.serving.tokens import Tokens, authorize, scope_of


class Guard(grpc.aio.ServerInterceptor):
    """Holds each call to the tokens that the server knows."""

    def __init__(self, tokens: Callable[[], Tokens]) -> None:
        """Guard a server.

        Args:
            tokens: Tells the tokens as they are now; their files may change.
        """
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The call's own handler, or one that refuses it; None for a method that does not exist."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        header = next(
            (value for key, value in handler_call_details.invocation_metadata or () if key == AUTHORIZATION),
            None,
        )
        try:
            authorize(
                scope_of(handler_call_details.method),
                header if isinstance(header, str) else None,
                self._tokens(),
            )
        except (UnauthenticatedError, PermissionDeniedError) as error:
            return refusing(handler, error)
        return handler
