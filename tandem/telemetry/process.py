"""A process's telemetry: its registry of metrics, its tracer, and what carries both out."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from wsgiref.simple_server import WSGIServer

import prometheus_client
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry, ProcessCollector

import tandem
from tandem.errors import ConfigurationError
from tandem.telemetry.choice import sends
from tandem.telemetry.exports import Exports, OtlpExports
from tandem.telemetry.settings import TelemetryOptions

logger = logging.getLogger(__name__)

# Maximum wait at the process's end: a collector that is gone must not delay a restart.
_CLOSE_SECONDS = 1.0


class Telemetry:
    """Traces and metrics of one process. Made once, started once, closed once."""

    def __init__(self, options: TelemetryOptions, service: str, exports: Exports | None = None) -> None:
        """Timing of the reports.

        Args:
            options: Where telemetry goes.
            service: coordinator, draft or target.
            exports: Exporters in place of those of the options.
        """
        self._options = options
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry(auto_describe=True)
        """Every metric of the process."""
        ProcessCollector(registry=self.registry)
        info = prometheus_client.Gauge(
            "tandem_build_info", "Always 1.", ("service", "version"), registry=self.registry
        )
        info.labels(service, tandem.__version__).set(1)
        if exports is None and sends(options):
            exports = OtlpExports(options, _resource(service), self.registry)
        self._exports = exports
        self._server: WSGIServer | None = None

    @property
    def tracer(self) -> Tracer | None:
        """Makes spans; None when traces go nowhere."""
        return None if self._exports is None else self._exports.tracer

    @property
    def prometheus_port(self) -> int | None:
        """Address of the metrics server, once started."""
        return None if self._server is None else self._server.server_port

    def start(self) -> None:
        """Begin to serve and send.

        Raises:
            ConfigurationError: the Prometheus port cannot be bound.
        """
        host, port = self._options.prometheus_host, self._options.prometheus_port
        if port is not None:
            try:
                self._server, _ = prometheus_client.start_http_server(port, host, self.registry)
            except OSError as error:
                raise ConfigurationError(
                    f"cannot serve metrics on {host}:{port}: {(error.strerror or str(error)).lower()}; choose "
                    "another address with --prometheus-host and --prometheus-port"
                ) from error
            logger.info("metrics served", extra={"address": f"{host}:{self.prometheus_port}"})
        if self._exports is not None:
            self._exports.start()

    async def close(self) -> None:
        """Send the rest, as far as that is quick, and end."""
        await asyncio.gather(self._end_exports(), self._end_server())

    async def _end_exports(self) -> None:
        if self._exports is not None:
            await asyncio.to_thread(self._exports.close, time.monotonic() + _CLOSE_SECONDS)

    async def _end_server(self) -> None:
        if self._server is not None:
            await asyncio.to_thread(self._server.shutdown)
            self._server.server_close()

    def prometheus_text(self) -> tuple[bytes, str]:
        """All metrics in Prometheus's text form, and its content type; for a server that has its own /metrics."""
        return prometheus_client.generate_latest(self.registry), prometheus_client.CONTENT_TYPE_LATEST


def _resource(service: str) -> Resource:
    """The telemetry resource. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override our names."""
    ours = {
        "service.name": f"tandem-{service}",
        "service.version": tandem.__version__,
        "service.instance.id": f"{os.uname().nodename}-{os.getpid()}",
    }
    detected = Resource.create()
    chosen = {
        name: value
        for name, value in detected.attributes.items()
        if name != "service.name" or not str(value).startswith("unknown_service")
    }
    return Resource({**ours, **chosen})
