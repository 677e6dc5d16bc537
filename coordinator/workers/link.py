"""Messages between the parent of several workers and its workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from coordinator.admin.servicer import AdminServicer, caller
from coordinator.settings.coordinator import CoordinatorSettings
from tandem.admin import Stats
from tandem.admin_client import AdminClient
from tandem.serving.interceptors import Context, ErrorBoundary, RunningCalls, metadata_of

_CALLER_KEY = "tandem-caller-bin"
"""Metadata that names the caller of a forwarded call."""
_METRICS = "tandem.workers.Metrics"
"""Service that answers with metrics in Prometheus's text form. Between parent and workers alone, and of bytes, so in no
proto."""
_ADMIN = "/tandem.v1.AdminService/"


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

    @property
    def address(self) -> str:
        """Address at which the worker answers its parent."""
        return socket_address(self.folder, self.index)


def socket_address(folder: str, name: int | str = "parent") -> str:
    """The private address of a worker, or of the parent, as gRPC spells it."""
    return f"unix:{Path(folder) / f'{name}'}"


_ROUNDED_UP = (
    "max_streams_per_peer",
    "max_concurrent_streams",
    "http_max_connections",
    "http_max_held_body_bytes",
    "http_max_held_answer_bytes",
)


def settings_of_worker(settings: CoordinatorSettings, setup: WorkerSetup) -> CoordinatorSettings:
    """The settings with the shared port and this worker's share of the bounds.

    The shares of running and waiting requests add up to the bounds exactly; the others are rounded up.
    """
    count = settings.workers
    shares = {
        name: -(-bound // count) for name in _ROUNDED_UP if (bound := getattr(settings, name)) is not None
    }
    for name in ("max_concurrent_requests", "max_queued_requests"):
        shares[name] = share(getattr(settings, name), setup.index, count)
    shares["http_max_held_body_bytes"] = max(shares["http_max_held_body_bytes"], settings.http_max_body_bytes)
    # The parent serves the metrics of all.
    return settings.model_copy(update={"workers": 1, "port": setup.port, "prometheus_port": None, **shares})


def share(bound: int, index: int, count: int) -> int:
    """A worker's part of a bound; the parts of all add up to it."""
    return bound // count + (index < bound % count)


async def private_server(
    address: str, admin: AdminServicer, metrics_text: Callable[[], Awaitable[bytes]]
) -> grpc.aio.Server:
    """A server of AdminService and metrics for the `Peer` at the other end of a socket."""

    async def get(_request: bytes, _context: Context) -> bytes:
        return await metrics_text()

    server = grpc.aio.server(interceptors=[ErrorBoundary(RunningCalls())])
    admin.add_to(server)
    methods: dict[str, Any] = {"Get": grpc.unary_unary_rpc_method_handler(get)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_METRICS, methods),))
    server.add_insecure_port(address)
    await server.start()
    return server


class Peer(AdminClient):
    """The other end of a private socket: a worker for its parent, the parent for a worker."""

    last_stats: Stats | None = None
    last_metrics: list[Metric] = []  # noqa: RUF012 - replaced, never changed
    """Statistics and metrics as last read."""

    async def stats(self) -> Stats:
        self.last_stats = await super().stats()
        return self.last_stats

    async def metrics(self) -> list[Metric]:
        """Metrics of this moment, or as last read where it does not answer."""
        with suppress(grpc.RpcError):
            text = await self.metrics_text()
            self.last_metrics = list(text_string_to_metric_families(text.decode()))
        return self.last_metrics

    async def metrics_text(self) -> bytes:
        """Read its metrics in Prometheus's text form.

        Raises:
            grpc.RpcError: there is no answer in time.
        """
        ask: Any = self._channel.unary_unary(f"/{_METRICS}/Get")
        answer: bytes = await ask(b"", timeout=self._timeout)
        return answer

    def stream(self, path: str, request: bytes, by: str) -> Any:
        """Have it answer a call, byte for byte; a call with one answer is a stream of one."""
        ask: Any = self._channel.unary_stream(path)
        return ask(request, metadata=((_CALLER_KEY, by.encode()),))


class ForwardedAdmin(grpc.GenericRpcHandler):
    """AdminService in a worker: each call goes on to the parent, which answers for all."""

    def __init__(self, parent: Peer) -> None:
        self._parent = parent

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """The handler of a call; None for one of another service."""
        path: str = details.method
        if not path.startswith(_ADMIN):
            return None

        async def forward(request: bytes, context: Context) -> AsyncIterator[bytes]:
            call = self._parent.stream(path, request, caller(context))
            try:
                async for answer in call:
                    yield answer
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.CANCELLED:
                    raise
                await context.abort(
                    error.code(), error.details() or "", tuple(error.trailing_metadata() or ())
                )
            finally:
                call.cancel()

        return grpc.unary_stream_rpc_method_handler(forward)


def forwarded_caller(context: Context) -> str:
    """The caller of a forwarded call, as the worker named it."""
    return metadata_of(context.invocation_metadata(), _CALLER_KEY) or caller(context)
