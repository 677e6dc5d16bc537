"""What the parent of several workers and its workers say to each other."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from coordinator.admin.servicer import caller
from coordinator.settings.coordinator import CoordinatorSettings
from tandem.serving.interceptors import Context

_CALLER_KEY = "tandem-caller-bin"
"""Metadata that names the caller of a forwarded call."""
_METRICS = "tandem.workers.Metrics"
"""Service that answers with metrics in Prometheus's text form. Between parent and workers alone, and of bytes, so in no
proto."""
_ADMIN = "tandem.v1.AdminService"


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


def forwarded_admin(channel: grpc.aio.Channel, methods: Iterable[str]) -> grpc.GenericRpcHandler:
    """Handlers of AdminService in a worker: each call goes on to the parent, byte for byte, which answers for all.

    Args:
        channel: To the parent.
        methods: Names of AdminService's methods.
    """

    def single(path: str) -> Callable[[bytes, Context], Awaitable[bytes]]:
        async def forward(request: bytes, context: Context) -> bytes:
            try:
                ask: Any = channel.unary_unary(path)
                answer: bytes = await ask(request, metadata=_named(context))
            except grpc.aio.AioRpcError as error:
                await _end_alike(context, error)
                raise
            return answer

        return forward

    def streaming(path: str) -> Callable[[bytes, Context], AsyncIterator[bytes]]:
        async def forward(request: bytes, context: Context) -> AsyncIterator[bytes]:
            ask: Any = channel.unary_stream(path)
            call = ask(request, metadata=_named(context))
            try:
                async for answer in call:
                    yield answer
            except grpc.aio.AioRpcError as error:
                await _end_alike(context, error)
            finally:
                call.cancel()

        return forward

    handlers: dict[str, Any] = {
        name: grpc.unary_unary_rpc_method_handler(single(f"/{_ADMIN}/{name}")) for name in methods
    }
    handlers["WatchStats"] = grpc.unary_stream_rpc_method_handler(streaming(f"/{_ADMIN}/WatchStats"))
    return grpc.method_handlers_generic_handler(_ADMIN, handlers)


def _named(context: Context) -> tuple[tuple[str, bytes], ...]:
    return ((_CALLER_KEY, caller(context).encode()),)


async def _end_alike(context: Context, error: grpc.aio.AioRpcError) -> None:
    """End the call as the parent ended it."""
    if error.code() is grpc.StatusCode.CANCELLED:
        raise error
    await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))


def forwarded_caller(context: Context) -> str:
    """The caller of a forwarded call, as the worker named it."""
    for key, value in context.invocation_metadata() or ():
        if key == _CALLER_KEY:
            return value.decode() if isinstance(value, bytes) else str(value)
    return caller(context)


def metrics_handler(text: Callable[[], Awaitable[bytes]]) -> grpc.GenericRpcHandler:
    """The handler that answers `metrics_from`."""

    async def get(_request: bytes, _context: Context) -> bytes:
        return await text()

    return grpc.method_handlers_generic_handler(_METRICS, {"Get": grpc.unary_unary_rpc_method_handler(get)})


async def metrics_from(channel: grpc.aio.Channel, seconds: float) -> bytes:
    """The metrics of the process at the channel's other end.

    Raises:
        grpc.RpcError: there is no answer within that time.
    """
    ask: Any = channel.unary_unary(f"/{_METRICS}/Get")
    answer: bytes = await ask(b"", timeout=seconds)
    return answer
