"""Whether a process has telemetry. The libraries for it are imported only when it has."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tandem.telemetry.settings import TelemetryOptions

if TYPE_CHECKING:
    from tandem.telemetry.process import Telemetry

_ENDPOINTS = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
)


def telemetry_for(options: TelemetryOptions, service: str, is_read: bool = False) -> Telemetry | None:
    """A process's telemetry; None when nobody would see it.

    Args:
        options: Where it goes.
        service: coordinator, draft or target.
        is_read: Whether the metrics are read in another way than the options tell.
    """
    if not (is_read or options.prometheus_port is not None or sends(options)):
        return None
    from tandem.telemetry.process import Telemetry

    return Telemetry(options, service)


def sends(options: TelemetryOptions) -> bool:
    """Whether traces and metrics are sent to a collector."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    return options.otlp_endpoint is not None or any(os.environ.get(name) for name in _ENDPOINTS)
