"""Method handlers, and how interceptors wrap them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behaviour: TypeAlias = Callable[[Any, Context], Any]

_MAKE_HANDLER = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""Handler factories, by whether requests and responses are streams."""


class Interceptor(grpc.aio.ServerInterceptor, ABC):
    """Stands before the methods of a server."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the handler for a call; None for a method that does not exist."""
        handler = await continuation(handler_call_details)
        return None if handler is None else self.before(handler, handler_call_details)

    @abstractmethod
    def before(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """Return the handler that answers the call: its own or another."""


def behaviour_of(handler: Handler) -> Behaviour:
    """The function that a handler calls."""
    kinds: tuple[Any, ...] = (
        handler.unary_unary,
        handler.unary_stream,
        handler.stream_unary,
        handler.stream_stream,
    )
    behaviour: Behaviour = next(filter(None, kinds))
    return behaviour


def remade(handler: Handler, behaviour: Behaviour, deserializer: Any = None) -> Handler:
    """Copy a method handler with another behaviour."""
    make: Any = _MAKE_HANDLER[handler.request_streaming, handler.response_streaming]
    made: Handler = make(behaviour, deserializer or handler.request_deserializer, handler.response_serializer)
    return made


def begun_at_once(handler: Handler, behaviour: Behaviour, deserializer: Any = None) -> Handler:
    """Copy a method handler with a behaviour that takes its requests as a stream, and starts before the first arrives.

    gRPC calls a method with a single request only once that has arrived, so a call that never sends it would stay.
    """
    make: Any = _MAKE_HANDLER[True, handler.response_streaming]
    made: Handler = make(behaviour, deserializer or handler.request_deserializer, handler.response_serializer)
    return made


def refusing(handler: Handler, error: Exception) -> Handler:
    """Copy a method handler so that it raises an error at once."""

    async def refuse(_requests: Any, _context: Context) -> None:
        raise error

    return begun_at_once(handler, refuse)


def traceparent_of(context: Context) -> str:
    """The W3C trace context that the client sent with the call; empty when it sent none."""
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent":
            return str(value)
    return ""
