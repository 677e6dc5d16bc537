"""Refuses calls while a server is loading or draining; health, reflection and administration always answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from tandem.errors import ServiceUnavailableError
from tandem.serving.edge import Context, Handler, begun_at_once

_ALWAYS_OPEN = ("/grpc.health.v1.", "/grpc.reflection.", "/tandem.v1.AdminService/")


class Gate(grpc.aio.ServerInterceptor):
    """Lets calls through while `closed_because` is empty, else answers UNAVAILABLE with that reason."""

    def __init__(self, closed_because: str) -> None:
        self.closed_because = closed_because

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The call's own handler, or one that refuses it; None for a method that does not exist."""
        handler = await continuation(handler_call_details)
        is_open = not self.closed_because or handler_call_details.method.startswith(_ALWAYS_OPEN)
        if handler is None or is_open:
            return handler
        return refusing(handler, ServiceUnavailableError(self.closed_because))


def refusing(handler: Handler, error: Exception) -> Handler:
    """The same method, raising an error whether or not a request comes."""

    async def refuse(_requests: Any, _context: Context) -> None:
        raise error

    return begun_at_once(handler, refuse)
