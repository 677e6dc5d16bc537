"""What the parent of several workers and its workers say to each other."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from coordinator.admin.servicer import caller
from coordinator.settings.coordinator import CoordinatorSettings
from tandem.serving.interceptors import Context, Handler


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """A worker's place among the others, and the state that it begins with."""

    index: int
    """From 0 on."""
    port: int
    """For gRPC; the same for all."""
    folder: str
    """Holds the sockets between parent and workers."""
    http_socket: int | None = None
    """Number of the inherited socket that listens for HTTP; None without HTTP."""
    listens_late: bool = False
    """True if others answer already, so that no connection is to come here before it is ready."""
    changes: dict[str, str] = field(default_factory=dict)
    """Options changed while the coordinator ran, as `LiveConfig.change` takes them."""
    drained: list[str] = field(default_factory=list)
    """Addresses of the replicas that an operator drained."""

    def to_json(self) -> str:
        """As one word of a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerSetup:
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))

    @property
    def address(self) -> str:
        """The worker's own address, for its parent alone."""
        return worker_address(self.folder, self.index)


def worker_address(folder: str, index: int) -> str:
    """Address at which a worker answers its parent, as gRPC spells it."""
    return f"unix:{Path(folder) / f'worker-{index}'}"


def parent_address(folder: str) -> str:
    """Address at which the parent answers its workers, as gRPC spells it."""
    return f"unix:{Path(folder) / 'parent'}"


def settings_of_worker(settings: CoordinatorSettings, setup: WorkerSetup) -> CoordinatorSettings:
    """The settings with the shared port and this worker's share of the bounds.

    The shares of running and waiting requests add up to the bounds exactly; the others are rounded up.
    """
    count = settings.workers

    def rounded_up(bound: int) -> int:
        return -(-bound // count)

    per_peer = settings.max_streams_per_peer
    bodies = rounded_up(settings.http_max_held_body_bytes)
    return settings.model_copy(
        update={
            "workers": 1,
            "port": setup.port,
            # The parent serves it for all.
            "prometheus_port": None,
            "max_concurrent_requests": share(settings.max_concurrent_requests, setup.index, count),
            "max_queued_requests": share(settings.max_queued_requests, setup.index, count),
            "max_streams_per_peer": None if per_peer is None else rounded_up(per_peer),
            "max_concurrent_streams": rounded_up(settings.max_concurrent_streams),
            "http_max_connections": rounded_up(settings.http_max_connections),
            "http_max_held_body_bytes": max(bodies, settings.http_max_body_bytes),
            "http_max_held_answer_bytes": rounded_up(settings.http_max_held_answer_bytes),
        }
    )


def share(bound: int, index: int, count: int) -> int:
    """A worker's part of a bound; the parts of all add up to it."""
    return bound // count + (index < bound % count)


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
