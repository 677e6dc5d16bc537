"""Telemetry of a draft or target service: its streams, its engine's steps, its KV cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Tracer
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tandem.telemetry.metrics import SEQUENCES, STEP_SECONDS, TOKENS, AtScrape, Histogram, family
from tandem.telemetry.process import Telemetry
from tandem.telemetry.spans import context_of, error_type, mark_error, rpc_span, under
from tandem.telemetry.streams import SequenceObserver, ServiceObserver

if TYPE_CHECKING:
    from tandem.engine.core.jobs import StepRecord
    from tandem.engine.interface import KvUsage

_LABELS = ("role", "model_name")

OUTCOMES = (
    *("finished", "cancelled"),
    *("invalid_argument", "resource_exhausted", "deadline_exceeded", "unavailable", "internal"),
)
"""Outcomes of a stream, in gRPC's words where it is an error."""


class ObservedService(ServiceObserver):
    """A service's traces and metrics. Nothing is counted before the model has a name: warming up is no work."""

    def __init__(self, telemetry: Telemetry, role: str) -> None:
        self.telemetry = telemetry
        self._role = role
        self._streams: StreamMetrics | None = None
        self._engine: EngineMetrics | None = None
        self.on_step = self._count_step

    def start(self) -> None:
        self.telemetry.start()

    def ready(self, model_name: str, kv_usage: Callable[[], KvUsage | None]) -> None:
        """Name the model in metrics from now on."""
        registry, labels = self.telemetry.registry, (self._role, model_name)
        self._streams = StreamMetrics(registry, labels)
        if kv_usage() is not None:
            self._engine = EngineMetrics(registry, labels)
            registry.register(AtScrape(kv_usage, lambda usage: _kv_metrics(labels, usage)))

    def waits(self, steps: Callable[[], float]) -> None:
        """Show what a question waits: in steps, which are long for one model and short for another."""
        assert self._streams is not None, "a draft is ready"
        text = "What a question to the draft waits at present, in steps of its measured profile."
        gauge = Gauge("tandem_draft_wait_steps", text, _LABELS, registry=self.telemetry.registry)
        gauge.labels(self._role, self._streams.model_name).set_function(steps)

    def _count_step(self, record: StepRecord) -> None:
        if self._engine is not None:
            self._engine.count(record)

    @contextmanager
    def stream(self, request_id: str, traceparent: str) -> Iterator[SequenceObserver]:
        assert self._streams is not None, "a service has no streams before it is ready"
        tracer = self.telemetry.tracer
        span: Span = INVALID_SPAN
        if tracer is not None:
            context, attributes = context_of(traceparent), {"tandem.request_id": request_id}
            span = rpc_span(tracer, self._role, SpanKind.SERVER, context, attributes)
        observer = ObservedSequence(self._streams, span, tracer)
        outcome = "finished"
        try:
            yield observer
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        except Exception as error:
            outcome = error_type(error)
            mark_error(span, error)
            raise
        finally:
            observer.ended(outcome)

    async def close(self) -> None:
        await self.telemetry.close()


class StreamMetrics:
    """Counts streams and times their steps."""

    def __init__(self, registry: CollectorRegistry, labels: tuple[str, str]) -> None:
        self.running = 0
        self.model_name = labels[1]
        text = "Sequences open now."
        running = Gauge("tandem_num_streams_running", text, _LABELS, registry=registry)
        running.labels(*labels).set_function(lambda: self.running)
        text = "Sequences that ended, by outcome."
        ended = Counter("tandem_streams", text, (*_LABELS, "outcome"), registry=registry)
        self._ended = {outcome: ended.labels(*labels, outcome) for outcome in OUTCOMES}
        text = "From a step's arrival to its answer, the wait for the engine included."
        steps = Histogram("tandem_stream_step_seconds", text, _LABELS, STEP_SECONDS, registry)
        self.step = steps.labels(*labels)

    def ended(self, outcome: str) -> None:
        """A stream ended."""
        self.running -= 1
        self._ended.get(outcome, self._ended["internal"]).inc()


class ObservedSequence(SequenceObserver):
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
        self._queue_seconds = time.perf_counter() - self._began

    def step_arrived(self) -> None:
        self._asked = time.perf_counter()
        if self._steps == 0 and self._tracer is not None and self._span.is_recording():
            self._prefill = self._tracer.start_span("prefill", under(self._span))
        self._steps += 1

    def answered(self, token_count: int) -> None:
        seconds = time.perf_counter() - self._asked
        self._step_seconds += seconds
        self._tokens += token_count
        self._metrics.step.observe(seconds)
        if self._steps == 1:
            self._prefill.end()

    def led(self, token_count: int) -> None:
        self._steps += 1
        self._tokens += token_count

    def ended(self, outcome: str) -> None:
        self._metrics.ended(outcome)
        if not self._span.is_recording():
            return
        if self._prefill.is_recording():
            self._prefill.end()
        self._span.set_attributes(
            {
                "tandem.steps": self._steps,
                "tandem.tokens": self._tokens,
                "tandem.seconds.queue": round(self._queue_seconds, 6),
                "tandem.seconds.steps": round(self._step_seconds, 6),
            }
        )
        if outcome == "cancelled":
            self._span.set_attribute("error.type", outcome)
        self._span.end()


class EngineMetrics:
    """Counts and times the engine's steps, on the engine's thread."""

    def __init__(self, registry: CollectorRegistry, labels: tuple[str, str]) -> None:
        self._seconds, self._model_seconds, self._sequences, self._tokens = (
            Histogram(f"tandem_engine_{name}", text, _LABELS, bounds, registry).labels(*labels)
            for name, text, bounds in (
                ("step_seconds", "An engine step, the head included.", STEP_SECONDS),
                ("model_seconds", "The forward pass of an engine step.", STEP_SECONDS),
                ("batch_sequences", "Sequences in an engine step.", SEQUENCES),
                ("batch_tokens", "Tokens in an engine step.", TOKENS),
            )
        )
        total = Counter("tandem_engine_tokens", "Tokens computed.", _LABELS, registry=registry)
        self._total = total.labels(*labels)

    def count(self, record: StepRecord) -> None:
        """A step was run."""
        self._seconds.observe(record.seconds)
        self._model_seconds.observe(record.model_seconds)
        self._sequences.observe(record.sequence_count)
        self._tokens.observe(record.token_count)
        self._total.inc(record.token_count)


def _kv_metrics(labels: tuple[str, str], usage: KvUsage) -> Iterator[Metric]:
    common = dict(zip(_LABELS, labels, strict=True))
    share = usage.reserved_tokens / max(1, usage.total_tokens)
    for name, text, value in (
        ("kv_cache_capacity_tokens", "Room of the KV cache.", usage.total_tokens),
        ("kv_cache_reserved_tokens", "Room in pages of open sequences.", usage.reserved_tokens),
        ("kv_cache_used_tokens", "Tokens of open sequences that are computed.", usage.used_tokens),
        ("kv_cache_retained_tokens", "Room held by prefixes for reuse.", usage.retained_tokens),
        ("kv_cache_usage_perc", "Share of the pages that open sequences hold, 0 to 1.", share),
        ("num_sequences_running", "Open sequences.", usage.sequence_count),
        ("num_sequences_waiting", "Sequences that wait because too many are open.", usage.waiting_count),
    ):
        yield family(GaugeMetricFamily, common, name, text, {(): value})
    for name, text, count in (
        ("num_preemptions", "Sequences that gave their pages to an older one.", usage.preemption_count),
        ("engine_led_steps", "Steps of sequences that went on before they were asked.", usage.led_step_count),
        ("engine_wasted_steps", "Those of them that nobody asked for in the end.", usage.wasted_step_count),
    ):
        yield family(CounterMetricFamily, common, name, text, {(): count})
