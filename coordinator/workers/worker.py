"""`python -m coordinator.workers.worker SETUP ...`: one of several coordinator processes on a port.

Parent and workers ask each other over private sockets, for what AdminService answers and for metrics.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import uvloop
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from coordinator.admin.servicer import AdminServicer, caller
from coordinator.service import CoordinatorService
from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.telemetry.observer import observer_for
from tandem.admin import Stats, Status
from tandem.admin_client import AdminClient
from tandem.serving.interceptors import CallInterceptor, Context, RunningCalls, guarding
from tandem.serving.server import exit_codes, serve_to_the_end, settings_of_process

CALLER_KEY = "tandem-caller-bin"
"""Metadata that names the caller of a forwarded call."""
_METRICS = "tandem.workers.Metrics"
"""Service between parent and workers alone, of bytes and so in no proto: metrics in Prometheus's text form."""
_ROUNDED_UP = (
    "max_streams_per_peer",
    "max_concurrent_streams",
    "http_max_connections",
    "http_max_held_body_bytes",
    "http_max_held_answer_bytes",
)


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

    def settings(self, whole: CoordinatorSettings) -> CoordinatorSettings:
        """The settings with the shared port and this worker's share of the bounds.

        The shares of running and waiting requests add up to the bounds exactly; the others are rounded up.
        """
        bounds = whole.model_dump(include={*_ROUNDED_UP}, exclude_none=True)
        shares = {name: -(-bound // whole.workers) for name, bound in bounds.items()}
        for name in ("max_concurrent_requests", "max_queued_requests"):
            shares[name] = share(getattr(whole, name), self.index, whole.workers)
        held = shares["http_max_held_body_bytes"]
        shares["http_max_held_body_bytes"] = max(held, whole.http_max_body_bytes)
        # The parent serves the metrics of all, and names them.
        own = {"workers": 1, "port": self.port, "prometheus_port": None, "metric_names": "tandem"}
        return whole.model_copy(update={**own, **shares})


def share(bound: int, index: int, count: int) -> int:
    """A worker's part of a bound; the parts of all add up to it."""
    return bound // count + (index < bound % count)


def socket_address(folder: str, name: int | str = "parent") -> str:
    """The private address of a worker, or of the parent, as gRPC spells it."""
    return f"unix:{folder}/{name}"


async def private_server(
    address: str, admin: AdminServicer, metrics_text: Callable[[], Awaitable[bytes | None]]
) -> grpc.aio.Server:
    """A server of AdminService and metrics for the `Peer` at the other end of a socket."""

    async def get(_request: bytes, _context: Context) -> bytes:
        return await metrics_text() or b""

    server = grpc.aio.server(interceptors=[CallInterceptor(guarding(RunningCalls()))])
    admin.add_to(server)
    handlers: dict[str, Any] = {"Get": grpc.unary_unary_rpc_method_handler(get)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_METRICS, handlers),))
    server.add_insecure_port(address)
    await server.start()
    return server


class Peer(AdminClient):
    """The other end of a private socket: a worker for its parent, the parent for a worker."""

    last_stats: Stats | None = None
    last_metrics: Sequence[Metric] = ()
    """Statistics and metrics as last read."""

    async def stats(self) -> Stats:
        self.last_stats = await super().stats()
        return self.last_stats

    async def metrics(self) -> Sequence[Metric]:
        """Metrics of this moment, or as last read where it does not answer."""
        with suppress(grpc.RpcError):
            self.last_metrics = [*text_string_to_metric_families((await self.metrics_text()).decode())]
        return self.last_metrics

    async def metrics_text(self) -> bytes:
        """Read its metrics in Prometheus's text form."""
        ask: Any = self._channel.unary_unary(f"/{_METRICS}/Get")
        answer: bytes = await ask(b"", timeout=self._timeout)
        return answer


class _Parent(Peer, grpc.GenericRpcHandler):
    """The parent, to which a worker hands each call of AdminService: it answers for all."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        path: str = details.method
        if not path.startswith("/tandem.v1.AdminService/"):
            return None
        # Byte for byte; a call with one answer is a stream of one
        ask: Any = self._channel.unary_stream(path)

        async def forward(request: bytes, context: Context) -> AsyncIterator[bytes]:
            call = ask(request, metadata=((CALLER_KEY, caller(context).encode()),))
            try:
                async for answer in call:
                    yield answer
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.CANCELLED:
                    raise
                details = error.details() or ""
                await context.abort(error.code(), details, tuple(error.trailing_metadata() or ()))
            finally:
                call.cancel()

        return grpc.unary_stream_rpc_method_handler(forward)


class WorkerService(CoordinatorService):
    """A coordinator that lets its parent answer what concerns all workers."""

    def __init__(self, settings: CoordinatorSettings, setup: WorkerSetup) -> None:
        """Set everything up, with the settings of the whole coordinator; nothing is connected yet."""
        is_read = settings.http_port is not None or settings.prometheus_port is not None
        own = setup.settings(settings)
        listening = None if setup.http_socket is None else socket.socket(fileno=setup.http_socket)
        super().__init__(own, observer_for(own, is_read), listening)
        self.answers_while_starting = not setup.listens_late
        self._setup = setup
        if setup.changes:
            self.live_config.change(setup.changes, (), "the state before this worker's start")
        self._private: grpc.aio.Server | None = None

    async def start(self) -> None:
        address = socket_address(self._setup.folder, self._setup.index)
        self._private = await private_server(address, AdminServicer(self.administration), super().metrics)
        await super().start()
        for shot in self.replicas.snapshots():
            if shot.address in self._setup.drained:
                self.replicas.pool(shot.role).drain(shot.address)

    def register_admin(self, server: grpc.aio.Server) -> None:
        """Let the parent answer AdminService."""
        # Made here and not earlier: a channel belongs to the event loop.
        self._parent = _Parent(socket_address(self._setup.folder))
        server.add_generic_rpc_handlers((self._parent,))

    async def status(self) -> Status:
        return await self._parent.status()

    async def metrics(self) -> bytes | None:
        return await self._parent.metrics_text()

    async def close(self) -> None:
        await super().close()
        if self._private is not None:
            # A call of the parent may be under way
            await self._private.stop(0.2)
        await self._parent.close()


def run(arguments: list[str]) -> None:
    """Serve as the worker that the first argument describes, until a signal ends it."""
    setup = WorkerSetup(**json.loads(arguments[0]))
    with exit_codes():
        settings = settings_of_process(CoordinatorSettings, arguments[1:], "tandem serve coordinator")
        service = WorkerService(settings, setup)
        own = setup.settings(settings)
        uvloop.run(serve_to_the_end(own, service, shares_port=True, listens_late=setup.listens_late))


if __name__ == "__main__":
    run(sys.argv[1:])
