"""One server's life: bind, load, serve, drain, exit."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tandem.errors import ConfigurationError
from tandem.serving.gate import Gate
from tandem.settings import ServerSettings

logger = logging.getLogger(__name__)

_SERVER_OPTIONS = (
    # Two servers would silently share the port.
    ("grpc.so_reuseport", 0),
    # A peer that is gone without a word is noticed by pings; clients may ping as often.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.ping_timeout_ms", 4_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class Service(Protocol):
    """What a server serves."""

    @property
    def name(self) -> str:
        """What people call it: draft, target or coordinator."""

    @property
    def full_names(self) -> Sequence[str]:
        """Names of its gRPC services, for health and reflection."""

    def register(self, server: grpc.aio.Server) -> None:
        """Add its servicers."""

    async def start(self) -> None:
        """Make it ready to answer: load the model, meet the other services."""

    async def close(self) -> None:
        """Let go of what `start` took. Called once no call runs."""


async def serve(settings: ServerSettings, service: Service) -> bool:
    """Serve until SIGTERM or SIGINT, then let running calls finish within the drain timeout.

    Writes two lines to stdout: where it listens, as soon as it does, and that it is ready.

    Returns:
        Whether it ever was ready.

    Raises:
        ConfigurationError: the address cannot be bound, or the service cannot start as it is set up.
    """
    gate = Gate(f"the {service.name} service is still starting")
    server = grpc.aio.server(
        interceptors=[gate],
        options=_SERVER_OPTIONS,
    )
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    service.register(server)
    reflection.enable_server_reflection(
        [*service.full_names, health.SERVICE_NAME, reflection.SERVICE_NAME], server
    )
    await _set_health(health_servicer, service, health_pb2.HealthCheckResponse.NOT_SERVING)
    address = _bind(server, settings)
    await server.start()
    _tell(f"tandem {service.name}: listening on {address}")
    with _stop_signals() as stopping:
        try:
            ready = await _unless(stopping, service.start())
            if ready:
                gate.closed_because = ""
                await _set_health(health_servicer, service, health_pb2.HealthCheckResponse.SERVING)
                _tell(f"tandem {service.name}: ready on {address}")
                await stopping.wait()
            gate.closed_because = f"the {service.name} service is draining"
            await health_servicer.enter_graceful_shutdown()
            logger.info(
                "draining", extra={"service": service.name, "seconds": settings.drain_timeout_seconds}
            )
            return ready
        finally:
            await server.stop(settings.drain_timeout_seconds)
            await service.close()
            logger.info("stopped", extra={"service": service.name})


def _bind(server: grpc.aio.Server, settings: ServerSettings) -> str:
    try:
        port = server.add_insecure_port(f"{settings.host}:{settings.port}")
    except RuntimeError:
        port = 0
    if port == 0:
        raise ConfigurationError(
            f"cannot listen on {settings.host}:{settings.port}: the port is in use or the address is not this "
            "machine's; choose another with --host and --port"
        )
    return f"{settings.host}:{port}"


async def _set_health(
    servicer: health.aio.HealthServicer,
    service: Service,
    status: health_pb2.HealthCheckResponse.ServingStatus,
) -> None:
    for name in ("", *service.full_names):
        await servicer.set(name, status)


@contextmanager
def _stop_signals() -> Iterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    try:
        yield stopping
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _unless(stopping: asyncio.Event, work: Coroutine[None, None, None]) -> bool:
    """Do the work unless the event comes first. True when the work was done; its exception is raised."""
    task = asyncio.ensure_future(work)
    stop = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        task.cancel()
        stop.cancel()
        await asyncio.gather(task, stop, return_exceptions=True)


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
