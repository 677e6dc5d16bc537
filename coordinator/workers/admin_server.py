"""The parent's servers: AdminService and metrics for its workers, and the Prometheus port."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import grpc.aio

from coordinator.admin.servicer import AdminServicer
from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.workers.forwarding import forwarded_caller, metrics_handler
from coordinator.workers.hub import Hub
from coordinator.workers.setup import parent_address
from tandem.errors import ConfigurationError
from tandem.serving.calls import RunningCalls
from tandem.serving.interceptors.error_boundary import ErrorBoundary
from tandem.v1 import admin_pb2_grpc

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 10.0


async def admin_server(hub: Hub, folder: str) -> grpc.aio.Server:
    """Serve AdminService and metrics to the workers, which forward their callers' calls."""
    server = grpc.aio.server(interceptors=[ErrorBoundary(RunningCalls())])
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(hub, forwarded_caller), server)
    server.add_generic_rpc_handlers((metrics_handler(hub.metrics_text),))
    server.add_insecure_port(parent_address(folder))
    await server.start()
    return server


def serve_metrics(settings: CoordinatorSettings, hub: Hub) -> WSGIServer | None:
    """Serve the metrics of all workers at the Prometheus port; None where there is none.

    Raises:
        ConfigurationError: the port cannot be bound.
    """
    host, port = settings.prometheus_host, settings.prometheus_port
    if port is None:
        return None
    import prometheus_client

    from coordinator.workers.metrics import Families, Given

    loop = asyncio.get_running_loop()

    def families() -> Families:
        # Called on a thread of the server.
        return asyncio.run_coroutine_threadsafe(hub.families(), loop).result(_PATIENCE_SECONDS)

    registry = prometheus_client.CollectorRegistry()
    registry.register(Given(families))
    try:
        server, _ = prometheus_client.start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigurationError(
            f"cannot serve metrics on {host}:{port}: {(error.strerror or str(error)).lower()}; choose another "
            "address with --prometheus-host and --prometheus-port"
        ) from error
    logger.info("metrics served", extra={"address": f"{host}:{server.server_port}"})
    return server
