"""Options of every process about traces and metrics."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import Field

from tandem.config.options import SHORT_HELP, Options


class TelemetryOptions(Options):
    """Destinations of traces and metrics. Nothing is collected unless one of these options, or one of
    OpenTelemetry's own, names a destination."""

    prometheus_port: Annotated[int | None, SHORT_HELP] = Field(default=None, ge=0, le=65535)
    """Port to serve metrics on, at /metrics; 0 takes any free one. By default they are not served."""
    prometheus_host: str = "127.0.0.1"
    """Address to serve metrics on."""
    metric_names: Literal["tandem", "vllm"] = "tandem"
    """Names of metrics for Prometheus: our own, or vLLM's where vLLM has them, for dashboards that exist."""
    otlp_endpoint: str | None = Field(default=None, pattern="^https?://")
    """OpenTelemetry collector for traces and metrics over gRPC, as http://host:4317. By default the one in
    OTEL_EXPORTER_OTLP_ENDPOINT; without it nothing is sent. OpenTelemetry's other variables apply as well."""
    trace_sample_ratio: float | None = Field(default=None, ge=0, le=1)
    """Share of the requests to trace, where the caller has not decided. By default what OTEL_TRACES_SAMPLER says, else
    all."""


def is_observed(options: TelemetryOptions, is_read: bool = False) -> bool:
    """True if anything receives a process's telemetry; `is_read`: something besides the options' exporters reads its
    metrics."""
    return is_read or options.prometheus_port is not None or sends(options)


def sends(options: TelemetryOptions) -> bool:
    """True if traces and metrics are sent to a collector."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    endpoints = [
        os.environ.get(f"OTEL_EXPORTER_OTLP_{which}ENDPOINT") for which in ("", "TRACES_", "METRICS_")
    ]
    return options.otlp_endpoint is not None or any(endpoints)
