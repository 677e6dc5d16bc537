"""Telemetry of a draft or target service: its streams, its engine's steps, its KV cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Tracer

from tandem.telemetry import attributes as names
from tandem.telemetry.process import Telemetry
from tandem.telemetry.service_metrics import EngineMetrics, KvCollector, StreamMetrics
from tandem.telemetry.spans import context_of, error_type, mark_error, under

if TYPE_CHECKING:
    from tandem.engine.core.events import StepRecord
    from tandem.engine.kv_cache.arena import KvUsage

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
