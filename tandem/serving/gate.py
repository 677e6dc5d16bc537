"""Refuses calls while a server is loading or draining; health and reflection always answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio

from tandem.serving.edge import Context

_ALWAYS_OPEN = ("/grpc.health.v1.", "/grpc.reflection.")

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


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
        return _refusal(handler, self.closed_because)


def _refusal(handler: Handler, reason: str) -> Handler:
    async def refuse(_request: Any, context: Context) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, reason)

    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(refuse, handler.request_deserializer, handler.response_serializer)
