"""Telemetry of a draft or target service: its streams, its engine's steps, its KV cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry.trace import Span, SpanKind
from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tandem.telemetry.metrics import TOKENS, Metrics, Read, Series, counter, family, histogram, on_loop
from tandem.telemetry.process import OtlpExports, Telemetry
from tandem.telemetry.settings import TelemetryOptions
from tandem.telemetry.spans import context_of, error_type, mark_error, rpc_span, under
from tandem.telemetry.streams import SequenceObserver, ServiceObserver

if TYPE_CHECKING:
    from tandem.engine.core.jobs import StepRecord
    from tandem.engine.interface import KvUsage

OUTCOMES = (
    *("finished", "cancelled"),
    *("invalid_argument", "resource_exhausted", "deadline_exceeded", "unavailable", "internal"),
)
"""Outcomes of a stream, in gRPC's words where it is an error."""
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class ObservedService(Telemetry, ServiceObserver):
    """A service's traces and metrics. Nothing is counted before the model has a name: warming up is no work."""

    def __init__(self, options: TelemetryOptions, role: str, exports: OtlpExports | None = None) -> None:
        super().__init__(options, role, exports)
        self.metrics: StreamMetrics | None = None
        self._engine: EngineMetrics | None = None
        self._role = role
        self.on_step = self._count_step
        self._labels: dict[str, str] = {}

    def ready(self, model_name: str, kv_usage: Callable[[], KvUsage | None]) -> None:
        self._labels = labels = {"role": self._role, "model_name": model_name}
        self.metrics = metrics = StreamMetrics(self.registry, **labels)
        self._gauge("num_streams_running", "Sequences open now.", lambda: metrics.running)
        if kv_usage() is not None:
            self._engine = EngineMetrics(self.registry, **labels)
            read = on_loop(kv_usage)
            self.registry.register(
                Read(lambda: () if (usage := read()) is None else _kv_metrics(labels, usage))
            )

    def waits(self, steps: Callable[[], float]) -> None:
        """Show what a question waits: in steps, which are long for one model and short for another."""
        text = "What a question to the draft waits at present, in steps of its measured profile."
        self._gauge("draft_wait_steps", text, steps)

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        labels = self._labels
        self.registry.register(Read(lambda: [family(GaugeMetricFamily, labels, name, text, read())]))

    def _count_step(self, record: StepRecord) -> None:
        if (engine := self._engine) is not None:
            engine.engine_step_seconds.observe(record.seconds)
            engine.engine_model_seconds.observe(record.model_seconds)
            engine.engine_batch_sequences.observe(record.sequence_count)
            engine.engine_batch_tokens.observe(record.token_count)
            engine.engine_tokens.inc(record.token_count)

    @contextmanager
    def stream(self, request_id: str, traceparent: str) -> Iterator[SequenceObserver]:
        assert self.metrics is not None, "a service has no streams before it is ready"
        attributes = {"tandem.request_id": request_id}
        span = rpc_span(self.tracer, self._role, SpanKind.SERVER, context_of(traceparent), attributes)
        observer = SequenceObserver(self.metrics.stream_step_seconds.observe)
        outcome = "finished"
        self.metrics.running += 1
        try:
            yield observer
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            span.set_attribute("error.type", outcome)
            raise
        except Exception as error:
            outcome = error_type(error)
            mark_error(span, error)
            raise
        finally:
            self.metrics.running -= 1
            self.metrics.streams.get(outcome, self.metrics.streams["internal"]).inc()
            if span.is_recording():
                self._end_span(span, observer)

    def _end_span(self, span: Span, observer: SequenceObserver) -> None:
        """End a stream's span; its child is the first step."""
        if observer.steps:
            offset = time.time() - time.perf_counter()
            ended = min(observer.prefill_ended, time.perf_counter())
            began = int(1e9 * (observer.prefill_began + offset))
            self.tracer.start_span("prefill", under(span), start_time=began).end(int(1e9 * (ended + offset)))
        span.set_attributes(
            {
                "tandem.steps": observer.steps,
                "tandem.tokens": observer.tokens,
                "tandem.seconds.queue": round(observer.queue_seconds, 6),
                "tandem.seconds.steps": round(observer.step_seconds, 6),
            }
        )
        span.end()


class StreamMetrics(Metrics):
    """Counts and times of streams."""

    running = 0
    streams: dict[str, Counter] = counter("Sequences that ended, by outcome.", outcome=OUTCOMES)
    stream_step_seconds: Series = histogram(
        "From a step's arrival to its answer, the wait for the engine included."
    )


class EngineMetrics(Metrics):
    """Counts and times of an engine's steps, on its thread."""

    engine_step_seconds: Series = histogram("An engine step, the head included.")
    engine_model_seconds: Series = histogram("The forward pass of an engine step.")
    engine_batch_sequences: Series = histogram("Sequences in an engine step.", SEQUENCES)
    engine_batch_tokens: Series = histogram("Tokens in an engine step.", TOKENS)
    engine_tokens: Counter = counter("Tokens computed.")


def _kv_metrics(labels: Mapping[str, str], usage: KvUsage) -> Iterator[Metric]:
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
        yield family(GaugeMetricFamily, labels, name, text, value)
    for name, text, count in (
        ("num_preemptions", "Sequences that gave their pages to an older one.", usage.preemption_count),
        (
            "prefix_cache_queries",
            "Tokens that new sequences looked up in the prefix cache.",
            usage.prefix_query_tokens,
        ),
        ("prefix_cache_hits", "Those of them that it held.", usage.prefix_hit_tokens),
        ("engine_led_steps", "Steps of sequences that went on before they were asked.", usage.led_step_count),
        ("engine_wasted_steps", "Those of them that nobody asked for in the end.", usage.wasted_step_count),
    ):
        yield family(CounterMetricFamily, labels, name, text, count)
