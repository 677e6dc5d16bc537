"""Metrics of the draft and the target service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.telemetry import buckets
from tandem.telemetry.on_loop import OnLoop

if TYPE_CHECKING:
    from tandem.engine.core.events import StepRecord
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
            buckets=buckets.STEP_SECONDS,
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
            "tandem_engine_step_seconds", "An engine step, the head included.", buckets.STEP_SECONDS
        )
        self._model_seconds = histogram(
            "tandem_engine_model_seconds", "The forward pass of an engine step.", buckets.STEP_SECONDS
        )
        self._sequences = histogram(
            "tandem_engine_batch_sequences", "Sequences in an engine step.", buckets.SEQUENCES
        )
        self._tokens = histogram("tandem_engine_batch_tokens", "Tokens in an engine step.", buckets.TOKENS)
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
