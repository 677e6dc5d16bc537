"""The observer that turns events of the request path into traces and metrics.

Attributes named gen_ai. follow OpenTelemetry's conventions for generative AI, which still move:
https://opentelemetry.io/docs/specs/semconv/gen-ai/
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

from opentelemetry.trace import INVALID_SPAN, Span, SpanKind

from tandem.model.types import CacheCounts, SpeculationStats
from tandem.rpc.channels import MessageWaits, Traffic
from tandem.telemetry.metrics import Read, on_loop
from tandem.telemetry.process import OtlpExports, Telemetry
from tandem.telemetry.spans import context_of, error_type, mark_error, rpc_span, traceparent_of, under
from tandem_coordinator.decoding.completion import Completion
from tandem_coordinator.settings.coordinator import CoordinatorSettings
from tandem_coordinator.stats.rounds import PHASES, RoundEnded, RoundPlan
from tandem_coordinator.stats.speculation import describe
from tandem_coordinator.telemetry.metrics import ERRORS, RequestMetrics, WaitMetrics, state_metrics
from tandem_coordinator.telemetry.observer import (
    Choices,
    EventValue,
    Observer,
    RequestObserver,
    State,
    StreamObserver,
)

_MAX_EVENTS = 64
"""A span keeps 128 events, the last ones; the first say more."""
_PEERS = tuple(product(("draft", "target"), ("sent", "received")))
_Bytes = Counter[tuple[str, str]]
"""Bytes of messages by peer and direction."""


class ObservedRequests(Telemetry, Observer):
    """Observes all requests."""

    def __init__(self, settings: CoordinatorSettings, exports: OtlpExports | None = None) -> None:
        super().__init__(settings, "coordinator", exports)
        self.settings = settings
        self.metrics: RequestMetrics | None = None
        self.message_waits: MessageWaits | None = None
        self.running: set[ObservedRequest] = set()
        self.ended_bytes: _Bytes = Counter(dict.fromkeys(_PEERS, 0))
        """Those of requests that have ended."""
        self._probe: asyncio.Task[None] | None = None

    def ready(
        self,
        model_name: str,
        state: Callable[[], State],
        refresh: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.metrics = RequestMetrics(self.registry, model_name=model_name)
        if self.settings.measure_waits:
            waits = WaitMetrics(self.registry, model_name=model_name).round_wait_seconds
            self.message_waits = MessageWaits(waits["answer"].observe, waits["question"].observe)
            self._probe = asyncio.create_task(probe_event_loop(waits["event_loop"].observe))
        read = on_loop(lambda: (state(), self._bytes()), refresh)
        self.registry.register(Read(lambda: () if (found := read()) is None else state_metrics(*found)))

    def _bytes(self) -> _Bytes:
        total = self.ended_bytes.copy()
        for request in self.running:
            total.update(request.bytes())
        return total

    async def close(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
        await super().close()

    def begin(
        self, request_id: str, traceparent: str = "", choices: Choices | None = None
    ) -> RequestObserver:
        """Observe a request; one that comes before there is a model is refused, and not counted."""
        if self.metrics is None:
            return RequestObserver()
        choices = choices or Choices()
        attributes: dict[str, str | int] = {
            "gen_ai.operation.name": choices.operation,
            "gen_ai.provider.name": "tandem",
            "gen_ai.response.id": request_id,
            "tandem.request_id": request_id,
        }
        if choices.count > 1:
            attributes["gen_ai.request.choice.count"] = choices.count
        span = self.tracer.start_span(choices.operation, context_of(traceparent), SpanKind.SERVER, attributes)
        return ObservedRequest(self, self.metrics, span, choices)


class ObservedRequest(RequestObserver):
    """Observes one request.

    A traced one has spans: itself, its prefill, a stream each to draft and target, and its rounds when sampled. A span
    costs some twenty microseconds, an event four, so values of every round are added up on the request's own span.
    """

    def __init__(
        self, all_requests: ObservedRequests, metrics: RequestMetrics, span: Span, choices: Choices
    ) -> None:
        """The services' spans continue the request's own, recorded or not."""
        self._choices = choices
        self._all = all_requests
        self._metrics = metrics
        self._span = span
        self._began = time.perf_counter()
        self._completion: Completion | None = None
        self._stats: SpeculationStats | None = None
        self._cache: CacheCounts | None = None
        self._plan: RoundPlan | None = None
        """Of the last round."""
        self._prompt_length = 0
        self._streams: list[tuple[str, Traffic]] = []
        self._seconds = dict.fromkeys(("queue", "prefill", *PHASES), 0.0)
        self._rounds = 0
        self._events = 0
        self._admitted: float | None = None
        self._first_token: float | None = None
        self._last_token: float | None = None
        self._prefill: Span = INVALID_SPAN
        # The sampler uses the other half of the id, so the two ratios are independent.
        is_chosen = (span.get_span_context().trace_id >> 64) / 2**64 < all_requests.settings.trace_rounds
        # Half of what the exporter's queue holds
        self._rounds_left = 1_000 if is_chosen and span.is_recording() else 0
        # Rounds are timed by the performance counter, spans in time since 1970.
        self._offset_seconds = time.time() - self._began

    def admitted(self) -> None:
        self._admitted = time.perf_counter()
        self._seconds["queue"] = seconds = self._admitted - self._began
        self._metrics.request_queue_time_seconds.observe(seconds)

    def planned(self, completion: Completion, details: Mapping[str, EventValue]) -> None:
        self._completion = completion
        self._prompt_length = completion.length
        self._metrics.prompt_tokens.inc(self._prompt_length)
        self._metrics.request_prompt_tokens.observe(self._prompt_length)
        self._metrics.request_params_max_tokens.observe(completion.room)
        if self._span.is_recording():
            self._span.update_name(f"{self._choices.operation} {details['gen_ai.request.model']}")
            self._span.set_attributes(details)
            self._prefill = self._all.tracer.start_span("prefill", under(self._span))

    def stream(self, role: str, address: str) -> StreamObserver:
        traffic = Traffic(waits=self._all.message_waits)
        host, _, port = address.rpartition(":")
        server: dict[str, str | int] = {"server.address": host or address}
        server |= {"server.port": int(port)} if port.isdigit() else {}
        span = rpc_span(self._all.tracer, role, SpanKind.CLIENT, under(self._span), server)
        self._streams.append((role, traffic))
        self._all.running.add(self)
        return StreamObserver(traceparent_of(span), traffic, partial(_end_stream, span, traffic))

    def bytes(self) -> _Bytes:
        total: _Bytes = Counter()
        for role, traffic in self._streams:
            total[role, "sent"] += traffic.sent_bytes
            total[role, "received"] += traffic.received_bytes
        return total

    def event(self, name: str, attributes: Mapping[str, EventValue]) -> None:
        for counters in (self._metrics.fallbacks, self._metrics.failovers):
            if (counter := counters.get(name)) is not None:
                counter.inc()
        self._events += 1
        if self._events <= _MAX_EVENTS:
            self._span.add_event(name, dict(attributes))

    def round_ended(self, result: RoundEnded) -> None:
        """A round ended; the first is the prefill."""
        timed = result.times
        self._rounds += 1
        self._plan = result.plan
        if result.committed:
            self._last_token = timed.decided
        if self._first_token is None and result.committed:
            self._first_token = timed.decided
            first = self._metrics.time_to_first_token_seconds[self._choices.operation]
            first.observe(timed.decided - self._began)
        if self._rounds == 1:
            self._seconds["prefill"] = timed.decided - timed.requested
            self._metrics.prefill_seconds.observe(timed.decided - timed.requested)
            self._end_prefill(self._nanoseconds(timed.decided))
        else:
            for phase, seconds in timed.phases.items():
                self._seconds[phase] += seconds
                self._metrics.round_phase_seconds[phase].observe(seconds)
            self._metrics.inter_token_latency_seconds.observe(timed.seconds)
        if self._rounds_left:
            self._rounds_left -= 1
            self._trace_round(result)

    def record_statistics(self, stats: SpeculationStats, cache: CacheCounts | None) -> None:
        self._stats = stats
        self._cache = cache

    def finished(self, error: BaseException | None) -> None:
        now = time.perf_counter()
        outcome = self._outcome(error)
        tokens = self._generated
        self._metrics.requests[outcome].inc()
        self._all.running.discard(self)
        self._all.ended_bytes.update(self.bytes())
        kind = "" if error is None else error_type(error)
        self._metrics.e2e_request_latency_seconds(self._choices.operation, kind).observe(now - self._began)
        if tokens:
            self._metrics.request_generation_tokens.observe(tokens)
        self._count_times(now, tokens)
        self._count_cache()
        if self._choices.end_one(tokens):
            self._metrics.request_params_n.observe(self._choices.count)
            self._metrics.request_max_num_generation_tokens.observe(self._choices.longest)
        if not self._span.is_recording():
            return
        self._end_prefill()
        self._span.set_attributes(self._attributes())
        if error is None:
            self._span.set_attribute("gen_ai.response.finish_reasons", [outcome])
        elif isinstance(error, Exception):
            mark_error(self._span, error)
        else:
            self._span.set_attribute("error.type", kind)
        self._span.end()

    def _count_times(self, now: float, tokens: int) -> None:
        """Count how long it took from its place, and from its first token, to its last."""
        if self._first_token is None or self._last_token is None or self._admitted is None:
            return
        metrics = self._metrics
        metrics.request_inference_time_seconds.observe(self._last_token - self._admitted)
        metrics.request_decode_time_seconds.observe(self._last_token - self._first_token)
        if tokens > 1:
            seconds = (now - self._first_token) / (tokens - 1)
            metrics.request_time_per_output_token_seconds[self._choices.operation].observe(seconds)

    def _count_cache(self) -> None:
        """Count what the target's cache has meant for it, if the target says so."""
        if self._cache is None:
            return
        cached, preemptions = self._cache
        metrics = self._metrics
        metrics.prompt_tokens_cached.inc(cached)
        metrics.prompt_tokens_by_source["local_cache_hit"].inc(cached)
        metrics.prompt_tokens_by_source["local_compute"].inc(self._prompt_length - cached)
        metrics.request_prefill_kv_computed_tokens.observe(self._prompt_length - cached)
        metrics.request_preemptions.inc(preemptions)
        metrics.request_num_preemptions.observe(preemptions)

    def _trace_round(self, result: RoundEnded) -> None:
        timed = result.times
        attributes: dict[str, EventValue] = {
            "tandem.round": self._rounds,
            "tandem.drafted_tokens": result.proposed,
            "tandem.accepted_tokens": result.accepted,
            **_seconds(timed.phases),
            **self._decision,
        }
        if result.awaited_outcome:
            attributes["tandem.ahead.hit"] = result.outcome_rank is not None
            if result.outcome_rank is not None:
                attributes["tandem.ahead.rank"] = result.outcome_rank + 1
        began = self._nanoseconds(timed.began)
        span = self._all.tracer.start_span(
            "round", under(self._span), attributes=attributes, start_time=began
        )
        span.end(self._nanoseconds(timed.decided))

    def _end_prefill(self, moment: int | None = None) -> None:
        if self._prefill.is_recording():
            self._prefill.end(moment)

    def _nanoseconds(self, moment: float) -> int:
        return int((moment + self._offset_seconds) * 1e9)

    @property
    def _generated(self) -> int:
        return 0 if self._completion is None else self._completion.length - self._prompt_length

    def _outcome(self, error: BaseException | None) -> str:
        if error is None:
            reason = None if self._completion is None else self._completion.finish_reason
            return "error" if reason is None else reason.value
        return next((name for kind, name in ERRORS if isinstance(error, kind)), "error")

    def _attributes(self) -> dict[str, Any]:
        attributes: dict[str, Any] = {**_seconds(self._seconds), **self._decision}
        own_bytes = self.bytes()
        for peer, direction in _PEERS:
            attributes[f"tandem.bytes.{peer}.{direction}"] = own_bytes[peer, direction]
        attributes["gen_ai.usage.output_tokens"] = self._generated
        if self._cache is not None:
            attributes["gen_ai.usage.cache_read.input_tokens"] = self._cache.cached_tokens
        if self._first_token is not None:
            attributes["tandem.time_to_first_token_seconds"] = round(self._first_token - self._began, 6)
        if self._events > _MAX_EVENTS:
            attributes["tandem.events_dropped"] = self._events - _MAX_EVENTS
        if self._stats is not None:
            attributes |= _describe(self._stats)
        return attributes

    @property
    def _decision(self) -> dict[str, EventValue]:
        """How much the last round proposed, and why; empty where no draft was to be asked."""
        plan = self._plan
        if plan is None or not plan.load:
            return {}
        return {
            "tandem.decision.tokens": plan.tokens,
            "tandem.decision.load": plan.load,
            "tandem.decision.predicted_gain": round(plan.predicted_gain, 3),
        }


def _end_stream(span: Span, traffic: Traffic, error: Exception | None = None) -> None:
    if not span.is_recording():
        return
    span.set_attributes(
        {
            "tandem.steps": traffic.received_messages,
            "tandem.bytes.sent": traffic.sent_bytes,
            "tandem.bytes.received": traffic.received_bytes,
        }
    )
    if error is not None:
        mark_error(span, error)
    span.end()


def _seconds(phases: Mapping[str, float]) -> dict[str, float]:
    return {f"tandem.seconds.{phase}": round(seconds, 6) for phase, seconds in phases.items()}


def _describe(stats: SpeculationStats) -> dict[str, Any]:
    found: dict[str, Any] = describe(stats)
    told = {
        "rounds": stats.rounds,
        "drafted_tokens": stats.drafted,
        "accepted_tokens": stats.accepted,
        **{name: found[name] for name in ("acceptance_rate", "acceptance_length", "tokens_per_pass")},
        **{f"acceptance_rate_per_position.{kind}": rates for kind, rates in found["per_position"].items()},
    }
    if stats.ahead.awaited:
        told |= {f"ahead.{name}": each for name, each in found["ahead"].items() if name != "hit_rate"}
    if stats.lead.rounds:
        told |= {f"lead.{name}": value for name, value in found["lead"].items()}
    return {f"tandem.{name}": value for name, value in told.items()}


async def probe_event_loop(observe: Callable[[float], None], interval_seconds: float = 0.005) -> None:
    """Measure until it is cancelled how long the event loop takes to get to what has come: a thread wakes it at regular
    intervals, and `observe` receives each wait in seconds. A probe costs some 20 us.

    gRPC hands over an answer the same way: its own thread wakes the loop, whose next turn wakes the task that reads. So
    a probe waits as long as an answer that comes at the same moment. A loop that is held up for long is probed all the
    while, so that a long wait counts as often as it deserves.
    """
    loop = asyncio.get_running_loop()
    ended = threading.Event()

    def woken(began: float) -> None:
        loop.call_soon(lambda: observe(time.perf_counter() - began))

    def probe() -> None:
        with suppress(RuntimeError):  # the loop was closed
            while not ended.wait(interval_seconds):
                loop.call_soon_threadsafe(woken, time.perf_counter())

    try:
        await asyncio.to_thread(probe)
    finally:
        ended.set()
