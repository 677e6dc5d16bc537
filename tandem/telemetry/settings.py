"""Options of every process about traces and metrics."""

from __future__ import annotations

from pydantic import Field

from tandem.config.options import Options


class TelemetryOptions(Options):
    """Destinations of traces and metrics. Nothing is collected unless one of these options, or one of
    OpenTelemetry's own, names a destination."""

    prometheus_port: int | None = Field(default=None, ge=0, le=65535)
    """Port to serve metrics on, at /metrics; 0 takes any free one. By default they are not served."""
    prometheus_host: str = "127.0.0.1"
    """Address to serve metrics on."""
    otlp_endpoint: str | None = Field(default=None, pattern="^https?://")
    """OpenTelemetry collector for traces and metrics over gRPC, as http://host:4317. By default the one in
    OTEL_EXPORTER_OTLP_ENDPOINT; without it nothing is sent. OpenTelemetry's other variables apply as well."""
    trace_sample_ratio: float | None = Field(default=None, ge=0, le=1)
    """Share of the requests to trace, where the caller has not decided. By default what OTEL_TRACES_SAMPLER says, else
    all."""
