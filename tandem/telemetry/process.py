"""A process's telemetry: its registry of metrics, its tracer, and what carries both out."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast
from wsgiref.simple_server import WSGIServer

import prometheus_client
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import export
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NoOpTracer, Tracer
from opentelemetry.util.types import Attributes
from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client import Metric as Family
from prometheus_client.samples import Sample

import tandem
from tandem.telemetry.metrics import Metrics, counter, end_server, name_metrics, serve_metrics
from tandem.telemetry.settings import TelemetryOptions, sends

logger = logging.getLogger(__name__)


class Telemetry:
    """Traces and metrics of one process. Made once, started once, closed once."""

    def __init__(self, options: TelemetryOptions, service: str, exports: OtlpExports | None = None) -> None:
        """Register the process's own metrics, and choose the exporters; `start` opens the port and begins to send."""
        self._options = options
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        info = prometheus_client.Gauge(
            "tandem_build_info", "Always 1.", ("service", "version"), registry=self.registry
        )
        info.labels(service, tandem.__version__).set(1)
        if exports is None and sends(options):
            # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override our names.
            ours = {
                "service.name": f"tandem-{service}",
                "service.version": tandem.__version__,
                "service.instance.id": f"{os.uname().nodename}-{os.getpid()}",
            }
            resource = Resource.create(ours).merge(OTELResourceDetector().detect())
            exports = OtlpExports(options, resource, self.registry)
        self._exports = exports
        self.tracer: Tracer = NoOpTracer() if exports is None else exports.tracer
        """Makes spans, which record nothing where traces go nowhere."""
        self._server: WSGIServer | None = None

    @property
    def prometheus_port(self) -> int | None:
        """Port of the metrics server; None before `start`, and without one."""
        return None if self._server is None else self._server.server_port

    def start(self) -> None:
        self._server = serve_metrics(self._options, self.registry)
        if self._exports is not None:
            self._exports.start()

    async def close(self) -> None:
        """Send the rest, as far as that is quick, and end."""
        ending: list[Awaitable[None]] = [end_server(self._server)]
        if self._exports is not None:
            # A collector that is gone must not delay a restart by more than a second.
            ending.append(asyncio.to_thread(self._exports.close, time.monotonic() + 1.0))
        await asyncio.gather(*ending)

    def prometheus_text(self) -> bytes:
        """All metrics in Prometheus's text form, for a server that has its own /metrics."""
        return prometheus_client.generate_latest(name_metrics(self.registry, self._options))


# ---- to a collector


class OtlpExports(Metrics):
    """Sends to a collector by OTLP, on threads of its own: one that is gone costs telemetry only."""

    telemetry_export_failures: dict[str, Counter] = counter(
        "Batches that the OTLP endpoint did not take.", signal=("traces", "metrics")
    )

    def __init__(self, options: TelemetryOptions, resource: Resource, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        # The library complains of each batch and each retry, and of each span that finds the queue full; `lost` says
        # the same once a minute.
        for name in ("opentelemetry.exporter.otlp", "opentelemetry.sdk._shared_internal"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        # For one batch, retries included: with the library's 10 s the queue of spans would fill up while a collector
        # restarts
        timeout = None if os.environ.get("OTEL_EXPORTER_OTLP_TIMEOUT") else 3.0
        self._complained = float("-inf")
        """When a loss was last said. At infinity nothing is said any more: a transfer that is cut off at the end may
        fail when the log has long been closed."""
        self._lock = threading.Lock()
        self._span_exporter = _SpanExporter(endpoint=options.otlp_endpoint, timeout=timeout)
        self._span_exporter.lost = self.lost
        self._spans = BatchSpanProcessor(self._span_exporter)
        ratio = options.trace_sample_ratio
        # Without one OTEL_TRACES_SAMPLER decides. The SDK's own exit hook would wait for the collector.
        sampler = None if ratio is None else ParentBased(TraceIdRatioBased(ratio))
        provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._spans)
        self.tracer = provider.get_tracer("tandem", tandem.__version__)
        self._metric_exporter = OTLPMetricExporter(endpoint=options.otlp_endpoint, timeout=timeout)
        self._registry = registry
        self._resource = resource
        self._started_ns = time.time_ns()
        self._ending = threading.Event()
        self._metrics = threading.Thread(target=self._send_metrics, name="tandem-metrics", daemon=True)

    def start(self) -> None:
        """Begin to send metrics. Spans are sent from the first on."""
        self._metrics.start()

    def close(self, deadline: float) -> None:
        self._ending.set()
        spans = threading.Thread(target=self._spans.shutdown, daemon=True)
        spans.start()
        ending = [each for each in (spans, self._metrics) if each.ident is not None]
        for thread in ending:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in ending):
            self._complain("traces and metrics")
        self._complained = float("inf")
        # Ends a transfer that is still under way, and with it the thread.
        self._span_exporter.shutdown()
        self._metric_exporter.shutdown()

    def _send_metrics(self) -> None:
        # In milliseconds; the dashboards look at minutes
        interval = float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL") or 10_000) / 1e3
        is_last = False
        while not is_last:
            is_last = self._ending.wait(interval)
            try:
                data = to_otlp(self._registry.collect(), self._resource, self._started_ns)
                is_sent = self._metric_exporter.export(data) is export.MetricExportResult.SUCCESS
            except Exception:
                is_sent = False
                logger.debug("metrics could not be sent", exc_info=True)
            if not is_sent:
                self.lost("metrics")

    def lost(self, signal: str) -> None:
        """Count a lost batch of `traces` or `metrics`."""
        self.telemetry_export_failures[signal].inc()
        self._complain(signal)

    def _complain(self, signal: str) -> None:
        now = time.monotonic()
        with self._lock:
            # A collector may be away for hours, and a batch is lost every few seconds.
            if now - self._complained < 60.0:
                return
            self._complained = now
        logger.warning(
            "the telemetry collector does not answer; what it would get is lost", extra={"signal": signal}
        )


class _SpanExporter(OTLPSpanExporter):
    lost: Callable[[str], None]

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        if result is not SpanExportResult.SUCCESS:
            self.lost("traces")
        return result


# ---- from Prometheus to OTLP, so that both have the same numbers

_CUMULATIVE = export.AggregationTemporality.CUMULATIVE
_CONVENTIONS: Mapping[str, str] = {
    "tandem_time_to_first_token_seconds": "gen_ai.server.time_to_first_token",
    "tandem_request_time_per_output_token_seconds": "gen_ai.server.time_per_output_token",
    "tandem_e2e_request_latency_seconds": "gen_ai.server.request.duration",
}
_UNITS = {
    "seconds": "s",
    "bytes": "By",
    "pos": "{token}",
    "length": "{token}",
    "queries": "{token}",
    "cached": "{token}",
    "source": "{token}",
}
"""UCUM's units, by the last word of a name. Other words in the plural count what they name."""


def unit_of(name: str) -> str:
    """The unit of one of our metrics, as OTLP spells it; empty for a number without one."""
    word = name.removesuffix("_running").removesuffix("_waiting").rpartition("_")[2]
    return _UNITS.get(word) or (f"{{{word[:-1]}}}" if word.endswith("s") else "")


def to_otlp(families: Iterable[Family], resource: Resource, started_ns: int) -> export.MetricsData:
    """Counters become cumulative monotonic sums, histograms explicit ones, all else gauges; what OpenTelemetry has a
    convention for is there under its name too."""
    now_ns = time.time_ns()
    metrics = [each for family in families if family.samples for each in _metrics(family, started_ns, now_ns)]
    scope = InstrumentationScope("tandem", tandem.__version__)
    scoped = export.ScopeMetrics(scope, metrics, "")
    return export.MetricsData([export.ResourceMetrics(resource, [scoped], "")])


def _metrics(family: Family, started_ns: int, now_ns: int) -> Iterator[export.Metric]:
    name = family.name
    text = family.documentation
    unit = unit_of(family.name)
    if family.type == "histogram":
        points = [*_histograms(family, started_ns, now_ns)]
        yield export.Metric(name, text, unit, export.Histogram(points, _CUMULATIVE))
        if name in _CONVENTIONS:
            named = [replace(point, attributes=_by_convention(point.attributes)) for point in points]
            yield export.Metric(_CONVENTIONS[name], text, unit, export.Histogram(named, _CUMULATIVE))
        return
    numbers = [
        export.NumberDataPoint(cast(dict[str, Any], sample.labels), started_ns, now_ns, float(sample.value))
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]
    is_counter = family.type == "counter"
    data = export.Sum(numbers, _CUMULATIVE, True) if is_counter else export.Gauge(numbers)
    yield export.Metric(name, text, unit, data)


def _by_convention(labels: Attributes) -> Attributes:
    others = dict(labels or {})
    error_type = others.pop("error_type", "")
    error = {"error.type": error_type} if error_type else {}
    return {
        "gen_ai.operation.name": others.pop("operation", "text_completion"),
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": others.pop("model_name"),
        **error,
        **others,
    }


def _histograms(family: Family, started_ns: int, now_ns: int) -> Iterator[export.HistogramDataPoint]:
    series: defaultdict[tuple[tuple[str, str], ...], list[Sample]] = defaultdict(list)
    for sample in family.samples:
        key = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
        series[key].append(sample)
    for labels, samples in series.items():
        buckets = [(float(s.labels["le"]), int(s.value)) for s in samples if s.name.endswith("_bucket")]
        total = next((s.value for s in samples if s.name.endswith("_sum")), 0.0)
        below = [0, *(count for _, count in buckets)]
        yield export.HistogramDataPoint(
            attributes=dict(labels),
            start_time_unix_nano=started_ns,
            time_unix_nano=now_ns,
            count=below[-1],
            sum=total,
            # Prometheus counts all below a bound, OTLP those between two.
            bucket_counts=[count - before for before, count in pairwise(below)],
            explicit_bounds=[bound for bound, _ in buckets[:-1]],
            min=cast(float, None),  # neither is known, and both are optional in the protocol
            max=cast(float, None),
        )
