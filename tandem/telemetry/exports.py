"""Sends traces and metrics to a collector by OTLP, on threads of its own: one that is gone costs telemetry only."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry, Counter

import tandem
from tandem.telemetry.otlp import to_otlp
from tandem.telemetry.settings import TelemetryOptions

logger = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 3.0
"""For one batch, its retries included, unless OTEL_EXPORTER_OTLP_TIMEOUT says otherwise."""
_METRICS_INTERVAL_SECONDS = 10.0
"""Unless OTEL_METRIC_EXPORT_INTERVAL (milliseconds) says otherwise."""
_SECONDS_BETWEEN_COMPLAINTS = 60.0


class Exports(Protocol):
    """Exporters of traces and metrics."""

    @property
    def tracer(self) -> Tracer:
        """Makes spans."""

    def start(self) -> None:
        """Begin to send."""

    def close(self, deadline: float) -> None:
        """Send the rest until the deadline (monotonic clock), then drop it."""


class OtlpExports:
    """Sends to a collector: spans by a batch processor, metrics by a thread."""

    def __init__(self, options: TelemetryOptions, resource: Resource, registry: CollectorRegistry) -> None:
        _silence_exporters()
        timeout = None if os.environ.get("OTEL_EXPORTER_OTLP_TIMEOUT") else _TIMEOUT_SECONDS
        endpoint = options.otlp_endpoint
        self._failures = Failures(registry)
        self._spans = BatchSpanProcessor(
            CountingSpanExporter(OTLPSpanExporter(endpoint=endpoint, timeout=timeout), self._failures)
        )
        # The SDK's own exit hook would wait for the collector.
        provider = TracerProvider(
            sampler=_sampler(options.trace_sample_ratio), resource=resource, shutdown_on_exit=False
        )
        provider.add_span_processor(self._spans)
        self.tracer: Tracer = provider.get_tracer("tandem", tandem.__version__)
        """Makes spans."""
        self._metrics = MetricsThread(
            OTLPMetricExporter(endpoint=endpoint, timeout=timeout), registry, resource, self._failures
        )

    def start(self) -> None:
        """Begin to send metrics. Spans are sent from the first on."""
        self._metrics.start()

    def close(self, deadline: float) -> None:
        """Send the rest until the deadline (monotonic clock), then drop it."""
        ending = [
            threading.Thread(target=end, daemon=True) for end in (self._spans.shutdown, self._metrics.close)
        ]
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in ending):
            self._failures.complain("traces and metrics")
        self._failures.mute()
        # Ends a transfer that is still under way, and with it the thread.
        self._spans.span_exporter.shutdown()
        self._metrics.abort()


class Failures:
    """Counts batches that the collector did not take, and complains of them once a minute."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = Counter(
            "tandem_telemetry_export_failures",
            "Batches that the OTLP endpoint did not take.",
            ("signal",),
            registry=registry,
        )
        self._counters = {signal: counter.labels(signal) for signal in ("traces", "metrics")}
        self._complained = float("-inf")
        self._is_muted = False
        self._lock = threading.Lock()

    def count(self, signal: str) -> None:
        """A batch of `traces` or `metrics` was lost."""
        self._counters[signal].inc()
        self.complain(signal)

    def complain(self, signal: str) -> None:
        """Say that `signal` was lost, unless that was said in the last minute."""
        now = time.monotonic()
        with self._lock:
            if self._is_muted or now - self._complained < _SECONDS_BETWEEN_COMPLAINTS:
                return
            self._complained = now
        logger.warning("the telemetry collector does not answer; what it would get is lost",
                       extra={"signal": signal})  # fmt: skip

    def mute(self) -> None:
        """Complain no more: a transfer that is cut off at the end may fail when the log has long been closed."""
        with self._lock:
            self._is_muted = True


class CountingSpanExporter(SpanExporter):
    """An exporter that counts its failures."""

    def __init__(self, exporter: SpanExporter, failures: Failures) -> None:
        self._exporter = exporter
        self._failures = failures
        self._is_shut_down = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._failures.count("traces")
        return result

    def shutdown(self) -> None:
        """End the transfer under way."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._exporter.shutdown()


class MetricsThread:
    """Sends all metrics of a registry now and then."""

    def __init__(
        self, exporter: MetricExporter, registry: CollectorRegistry, resource: Resource, failures: Failures
    ) -> None:
        self._exporter = exporter
        self._registry = registry
        self._resource = resource
        self._failures = failures
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tandem-metrics", daemon=True)
        self._started_ns = time.time_ns()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Send a last time, and end."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()

    def abort(self) -> None:
        """End the transfer under way."""
        self._exporter.shutdown()

    def _run(self) -> None:
        interval = _metrics_interval_seconds()
        while not self._ending.wait(interval):
            self._send()
        self._send()

    def _send(self) -> None:
        try:
            metrics = to_otlp(self._registry.collect(), self._resource, self._started_ns)
            result = self._exporter.export(metrics)
        except Exception:
            result = MetricExportResult.FAILURE
            logger.debug("metrics could not be sent", exc_info=True)
        if result is not MetricExportResult.SUCCESS:
            self._failures.count("metrics")


def _metrics_interval_seconds() -> float:
    milliseconds = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL")
    return float(milliseconds) / 1e3 if milliseconds else _METRICS_INTERVAL_SECONDS


def _sampler(ratio: float | None) -> ParentBased | None:
    """None leaves it to OTEL_TRACES_SAMPLER."""
    return None if ratio is None else ParentBased(TraceIdRatioBased(ratio))


def _silence_exporters() -> None:
    """The library complains of each batch and each retry, and of each span that finds the queue full; `Failures` says
    the same once a minute."""
    for name in ("opentelemetry.exporter.otlp", "opentelemetry.sdk._shared_internal"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
