"""AdminService in a worker: each call goes on to the parent, byte for byte, which answers for all workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from coordinator.admin.servicer import caller
from tandem.serving.interceptors.handlers import Context, Handler

CALLER_KEY = "tandem-caller-bin"
"""Metadata that names the caller of a forwarded call."""
METRICS_METHOD = "/tandem.workers.Metrics/Get"
"""Answers with metrics in Prometheus's text form. Between parent and workers alone, and of bytes, so in no proto."""

_ADMIN_PREFIX = "/tandem.v1.AdminService/"
_STREAMING = frozenset({f"{_ADMIN_PREFIX}WatchStats"})


class ForwardedAdmin(grpc.GenericRpcHandler):
    """Handlers of AdminService that forward to the parent."""

    def __init__(self, channel: grpc.aio.Channel, methods: frozenset[str]) -> None:
        """Forward calls.

        Args:
            channel: To the parent.
            methods: Names of AdminService's methods.
        """
        self._channel = channel
        self._methods = frozenset(_ADMIN_PREFIX + name for name in methods)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """The handler of a method; None for those of other services."""
        method = handler_call_details.method
        if method not in self._methods:
            return None
        if method in _STREAMING:
            return grpc.unary_stream_rpc_method_handler(self._streaming(method))
        return grpc.unary_unary_rpc_method_handler(self._single(method))

    def _single(self, method: str) -> Callable[[bytes, Context], Any]:
        async def forward(request: bytes, context: Context) -> bytes:
            try:
                ask: Any = self._channel.unary_unary(method)
                answer: bytes = await ask(request, metadata=_named(context))
            except grpc.aio.AioRpcError as error:
                await _end_alike(context, error)
                raise
            return answer

        return forward

    def _streaming(self, method: str) -> Callable[[bytes, Context], Any]:
        async def forward(request: bytes, context: Context) -> AsyncIterator[bytes]:
            ask: Any = self._channel.unary_stream(method)
            call = ask(request, metadata=_named(context))
            try:
                async for answer in call:
                    yield answer
            except grpc.aio.AioRpcError as error:
                await _end_alike(context, error)
            finally:
                call.cancel()

        return forward


def forwarded_caller(context: Context) -> str:
    """The caller of a forwarded call, as the worker named it."""
    for key, value in context.invocation_metadata() or ():
        if key == CALLER_KEY:
            return value.decode() if isinstance(value, bytes) else str(value)
    return caller(context)


def metrics_handler(text: Callable[[], Any]) -> grpc.GenericRpcHandler:
    """The handler of `METRICS_METHOD`.

    Args:
        text: Returns an awaitable of the metrics.
    """

    async def get(_request: bytes, _context: Context) -> bytes:
        content: bytes = await text()
        return content

    service, method = METRICS_METHOD.strip("/").split("/")
    return grpc.method_handlers_generic_handler(service, {method: grpc.unary_unary_rpc_method_handler(get)})


async def metrics_from(channel: grpc.aio.Channel, seconds: float) -> bytes:
    """The metrics of the process at the channel's other end.

    Raises:
        grpc.RpcError: there is no answer within that time.
    """
    ask: Any = channel.unary_unary(METRICS_METHOD)
    answer: bytes = await ask(b"", timeout=seconds)
    return answer


def _named(context: Context) -> tuple[tuple[str, bytes], ...]:
    return ((CALLER_KEY, caller(context).encode()),)


async def _end_alike(context: Context, error: grpc.aio.AioRpcError) -> None:
    """End the call as the parent ended it."""
    if error.code() is grpc.StatusCode.CANCELLED:
        raise error
    await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
