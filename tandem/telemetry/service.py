"""Telemetry of a draft or target service: its streams, its engine's steps, its KV cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Tracer
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.telemetry import attributes as names
from tandem.telemetry.metrics import SEQUENCES, STEP_SECONDS, TOKENS, OnLoop
from tandem.telemetry.process import Telemetry
from tandem.telemetry.spans import context_of, error_type, mark_error, under

if TYPE_CHECKING:
    from tandem.engine.core.jobs import StepRecord
    from tandem.engine.kv_cache.arena import KvUsage


_LABELS = ("role", "model_name")

OUTCOMES = (
    "finished",
    "cancelled",
    "invalid_argument",
    "resource_exhausted",
    "deadline_exceeded",
    "unavailable",
    "internal",
)
"""How a stream ends, in gRPC's words where it is an error."""


class StreamMetrics:
    """Counts streams and times their steps. Nothing before the model has a name."""

    def __init__(self, registry: CollectorRegistry, role: str) -> None:
        self.running = 0
        self._role = role
        self._ended = Counter(
            "tandem_streams", "Sequences that ended, by outcome.", (*_LABELS, "outcome"), registry=registry
        )
        self._steps = Histogram(
            "tandem_stream_step_seconds",
            "From a step's arrival to its answer, the wait for the engine included.",
            _LABELS,
            registry=registry,
            buckets=STEP_SECONDS,
        )
        self._registry = registry
        self._step: Histogram | None = None
        self._model_name = ""

    def name(self, model_name: str) -> None:
        """Begin to count, under this name."""
        self._model_name = model_name
        self._step = self._steps.labels(self._role, model_name)
        for outcome in OUTCOMES:
            self._ended.labels(self._role, model_name, outcome)
        self._registry.register(_Running(self, self._role, model_name))

    def answered(self, seconds: float) -> None:
        """A step was answered."""
        if self._step is not None:
            self._step.observe(seconds)

    def ended(self, outcome: str) -> None:
        """A stream ended."""
        outcome = outcome if outcome in OUTCOMES else "internal"
        self._ended.labels(self._role, self._model_name, outcome).inc()


class _Running(Collector):
    def __init__(self, metrics: StreamMetrics, role: str, model_name: str) -> None:
        self._metrics = metrics
        self._labels = (role, model_name)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily("tandem_num_streams_running", "Sequences open now.", labels=_LABELS)
        family.add_metric(self._labels, self._metrics.running)
        yield family


class EngineMetrics:
    """Counts and times the engine's steps, on the engine's thread. Warming up is not counted."""

    def __init__(self, registry: CollectorRegistry, role: str) -> None:
        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, _LABELS, registry=registry, buckets=bounds)

        self._role = role
        self._seconds = histogram(
            "tandem_engine_step_seconds", "An engine step, the head included.", STEP_SECONDS
        )
        self._model_seconds = histogram(
            "tandem_engine_model_seconds", "The forward pass of an engine step.", STEP_SECONDS
        )
        self._sequences = histogram(
            "tandem_engine_batch_sequences", "Sequences in an engine step.", SEQUENCES
        )
        self._tokens = histogram("tandem_engine_batch_tokens", "Tokens in an engine step.", TOKENS)
        self._total = Counter("tandem_engine_tokens", "Tokens computed.", _LABELS, registry=registry)
        self._of_model: tuple[Histogram, Histogram, Histogram, Histogram, Counter] | None = None

    def name(self, model_name: str) -> None:
        """Begin to count, under this name."""
        labels = (self._role, model_name)
        self._of_model = (
            self._seconds.labels(*labels),
            self._model_seconds.labels(*labels),
            self._sequences.labels(*labels),
            self._tokens.labels(*labels),
            self._total.labels(*labels),
        )

    def count(self, record: StepRecord) -> None:
        """A step was run."""
        if self._of_model is not None:
            seconds, model_seconds, sequences, tokens, total = self._of_model
            seconds.observe(record.seconds)
            model_seconds.observe(record.model_seconds)
            sequences.observe(record.sequence_count)
            tokens.observe(record.token_count)
            total.inc(record.token_count)


class KvCollector(Collector):
    """Usage of the KV cache at scrape time."""

    def __init__(self, model_name: str, role: str, usage: Callable[[], KvUsage | None]) -> None:
        self._labels = (role, model_name)
        self._usage = OnLoop(usage)

    def describe(self) -> Iterator[Metric]:
        """Describe nothing: at registration it is too early to ask the event loop."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """A gauge for each figure, and the preemptions so far."""
        usage = self._usage()
        if usage is None:
            return
        gauges = (
            ("kv_cache_capacity_tokens", "Room of the KV cache.", usage.total_tokens),
            ("kv_cache_reserved_tokens", "Room in pages of open sequences.", usage.reserved_tokens),
            ("kv_cache_used_tokens", "Tokens of open sequences that are computed.", usage.used_tokens),
            ("kv_cache_retained_tokens", "Room held by prefixes for reuse.", usage.retained_tokens),
            ("kv_cache_usage_perc", "Share of the pages that open sequences hold, 0 to 1.",
             usage.reserved_tokens / max(1, usage.total_tokens)),
            ("num_sequences_running", "Open sequences.", usage.sequence_count),
            ("num_sequences_waiting", "Sequences that wait because too many are open.", usage.waiting_count),
        )  # fmt: skip
        for name, text, value in gauges:
            family = GaugeMetricFamily(f"tandem_{name}", text, labels=_LABELS)
            family.add_metric(self._labels, value)
            yield family
        preemptions = CounterMetricFamily(
            "tandem_num_preemptions", "Sequences that gave their pages to an older one.", labels=_LABELS
        )
        preemptions.add_metric(self._labels, usage.preemption_count)
        yield preemptions


_METHODS = {"draft": ("tandem.v1.DraftService", "Propose"), "target": ("tandem.v1.TargetService", "Verify")}


class ObservedService:
    """A service's traces and metrics."""

    def __init__(self, telemetry: Telemetry, role: str) -> None:
        self.telemetry = telemetry
        self._role = role
        self._streams = StreamMetrics(telemetry.registry, role)
        self._engine = EngineMetrics(telemetry.registry, role)

    @property
    def on_step(self) -> Callable[[StepRecord], None]:
        """Counts a step of the engine."""
        return self._engine.count

    def start(self) -> None:
        """Begin to serve and send."""
        self.telemetry.start()

    def ready(self, model_name: str, kv_usage: Callable[[], KvUsage | None]) -> None:
        """Name the model in metrics from now on."""
        self._streams.name(model_name)
        if kv_usage() is not None:
            self._engine.name(model_name)
            self.telemetry.registry.register(KvCollector(model_name, self._role, kv_usage))

    @contextmanager
    def stream(self, request_id: str, traceparent: str) -> Iterator[ObservedStream]:
        """Observe a stream for as long as the block lasts."""
        observer = ObservedStream(self._streams, self._span(request_id, traceparent), self.telemetry.tracer)
        outcome = "finished"
        try:
            yield observer
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        except Exception as error:
            outcome = error_type(error)
            observer.failed(error)
            raise
        finally:
            observer.ended(outcome)

    async def close(self) -> None:
        """Send the rest."""
        await self.telemetry.close()

    def _span(self, request_id: str, traceparent: str) -> Span:
        tracer = self.telemetry.tracer
        if tracer is None:
            return INVALID_SPAN
        service, method = _METHODS[self._role]
        attributes = {
            names.RPC_SYSTEM: "grpc",
            names.RPC_SERVICE: service,
            names.RPC_METHOD: method,
            names.REQUEST_ID: request_id,
        }
        context = context_of(traceparent)
        return tracer.start_span(f"{service}/{method}", context, SpanKind.SERVER, attributes)


class ObservedStream:
    """One sequence's stream: a span with a child for its first step, which reads the prompt."""

    def __init__(self, metrics: StreamMetrics, span: Span, tracer: Tracer | None) -> None:
        self._metrics = metrics
        self._span = span
        self._tracer = tracer
        self._prefill: Span = INVALID_SPAN
        self._began = self._asked = time.perf_counter()
        self._queue_seconds = self._step_seconds = 0.0
        self._steps = self._tokens = 0
        metrics.running += 1

    def opened(self) -> None:
        """The sequence has its place."""
        self._queue_seconds = time.perf_counter() - self._began

    def step_arrived(self) -> None:
        """A step arrived."""
        self._asked = time.perf_counter()
        if self._steps == 0 and self._tracer is not None and self._span.is_recording():
            self._prefill = self._tracer.start_span("prefill", under(self._span))
        self._steps += 1

    def answered(self, token_count: int) -> None:
        """Its answer is ready."""
        seconds = time.perf_counter() - self._asked
        self._step_seconds += seconds
        self._tokens += token_count
        self._metrics.answered(seconds)
        if self._steps == 1:
            self._prefill.end()

    def failed(self, error: Exception) -> None:
        """The stream ends with an error."""
        mark_error(self._span, error)

    def ended(self, outcome: str) -> None:
        """The stream is over."""
        self._metrics.running -= 1
        self._metrics.ended(outcome)
        if self._span.is_recording():
            if self._prefill.is_recording():
                self._prefill.end()
            self._span.set_attributes(
                {
                    names.STEPS: self._steps,
                    names.TOKENS: self._tokens,
                    names.SECONDS + "queue": round(self._queue_seconds, 6),
                    names.SECONDS + "steps": round(self._step_seconds, 6),
                }
            )
            if outcome == "cancelled":
                self._span.set_attribute(names.ERROR_TYPE, outcome)
            self._span.end()
