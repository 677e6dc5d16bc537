"""Chooses whether a process has telemetry. Its libraries are imported only then."""

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
    """A process's telemetry; None when nothing would receive it.

    Args:
        options: Where it goes.
        service: coordinator, draft or target.
        is_read: Whether anything besides the options' exporters reads the metrics.
    """
    if not (is_read or options.prometheus_port is not None or sends(options)):
        return None
    from tandem.telemetry.process import Telemetry

    return Telemetry(options, service)


def sends(options: TelemetryOptions) -> bool:
    """True if traces and metrics are sent to a collector."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    return options.otlp_endpoint is not None or any(os.environ.get(name) for name in _ENDPOINTS)
