"""The observer that turns events of the request path into traces and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial

from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Tracer
from prometheus_client import CollectorRegistry

from coordinator.decoding.completion import Completion
from coordinator.stats.rounds import RoundResult, RoundTimes
from coordinator.stats.speculation import (
    acceptance_length,
    acceptance_rate,
    add,
    conditional_rates,
    cumulative_rates,
    since,
    tokens_per_pass,
)
from coordinator.telemetry.metrics import RecentStats, RequestMetrics
from coordinator.telemetry.observer import EventValue, Observer, RequestObserver, StreamObserver
from tandem.errors import (
    AbortedError,
    CapacityError,
    DeadlineError,
    InvalidRequestError,
    ServiceUnavailableError,
)
from tandem.rpc.channels import Traffic
from tandem.telemetry import attributes as names
from tandem.telemetry.spans import METHODS, context_of, mark_error, traceparent_of, under
from tandem.types import SpeculationStats

COUNTING_INTERVAL_SECONDS = 1.0
"""Interval at which a running request is added to the counters. Adding takes some 40 us."""
_MAX_EVENTS = 64
"""A span keeps 128 events, the last ones; the first say more."""
_MAX_ROUNDS = 1_000
"""Rounds of a request with a span, half of what the exporter's queue holds."""
_WHERE_ASKED_FOR = {"top_p": names.GEN_AI_REQUEST_TOP_P, "top_k": names.GEN_AI_REQUEST_TOP_K}
_PHASES = ("draft", "verify", "sampling", "wait")

_OUTCOMES: tuple[tuple[type[BaseException], str], ...] = (
    (InvalidRequestError, "invalid"),
    (CapacityError, "refused"),
    (DeadlineError, "deadline"),
    (AbortedError, "aborted"),
    (ServiceUnavailableError, "unavailable"),
    (asyncio.CancelledError, "cancelled"),
    (GeneratorExit, "cancelled"),
)


class ObservedRequests(Observer):
    """Observes all requests."""

    def __init__(self, registry: CollectorRegistry, tracer: Tracer | None, trace_rounds: float) -> None:
        self._registry = registry
        self._tracer = tracer
        self._trace_rounds = trace_rounds
        self._metrics: RequestMetrics | None = None
        self.recent = RecentStats()
        """Speculation statistics of the last minute."""

    def serve(
        self, model_name: str, num_speculative_tokens: int, measures_waits: bool = False
    ) -> RequestMetrics:
        """Count requests for this model from now on, whose proposals usually have so many tokens; its metrics."""
        self._metrics = RequestMetrics(
            self._registry, model_name, num_speculative_tokens, measures_waits=measures_waits
        )
        return self._metrics

    def begin(self, request_id: str, traceparent: str = "") -> RequestObserver:
        """Observe a request; one that comes before there is a model is refused, and not counted."""
        if self._metrics is None:
            return RequestObserver()
        span: Span = INVALID_SPAN
        if self._tracer is not None:
            attributes = {
                names.GEN_AI_OPERATION: names.TEXT_COMPLETION,
                names.GEN_AI_PROVIDER: names.PROVIDER,
                names.GEN_AI_RESPONSE_ID: request_id,
                names.REQUEST_ID: request_id,
            }
            span = self._tracer.start_span(
                names.TEXT_COMPLETION, context_of(traceparent), SpanKind.SERVER, attributes
            )
        spans = None
        if self._tracer is not None and span.is_recording():
            spans = RequestSpans(self._tracer, span, self._trace_rounds)
        return ObservedRequest(self._metrics, span, spans, self.recent)


class ObservedRequest(RequestObserver):
    """Observes one request."""

    def __init__(
        self, metrics: RequestMetrics, span: Span, spans: RequestSpans | None, recent: RecentStats
    ) -> None:
        """
        Args:
            metrics: What the request adds to.
            span: The request's own, recorded or not: the services' spans continue it.
            spans: All its spans; None where they are not recorded.
            recent: Speculation statistics of the last minute.
        """
        self._metrics = metrics
        self._span = span
        self._spans = spans
        self._recent = recent
        self._began = time.perf_counter()
        self._rule = ""
        self._completion: Completion | None = None
        self._prompt_length = 0
        self._streams: list[ObservedStream] = []
        self._seconds = dict.fromkeys(("queue", "prefill", *_PHASES), 0.0)
        self._rounds = 0
        self._decision: Callable[[], Mapping[str, EventValue]] = dict
        self._first_token: float | None = None
        self._counted_at = self._began
        self._counted = SpeculationStats()
        self._counted_tokens = 0
        self._counted_bytes = dict.fromkeys(metrics.wire, 0)

    def admitted(self) -> None:
        """The request has its place."""
        self._seconds["queue"] = seconds = time.perf_counter() - self._began
        self._metrics.queue.observe(seconds)

    def planned(self, completion: Completion, details: Mapping[str, EventValue]) -> None:
        """The request was checked."""
        self._completion = completion
        self._rule = str(details["rule"])
        self._prompt_length = completion.length
        self._metrics.prompt_tokens.inc(self._prompt_length)
        self._metrics.request_prompt.observe(self._prompt_length)
        if self._spans is not None:
            self._spans.planned(details)

    def stream(self, role: str, address: str) -> ObservedStream:
        """Observe a stream."""
        span, ended = self._span, None
        if self._spans is not None:
            span = self._spans.stream(role, address)
            ended = partial(_end_stream, span)
        traffic = Traffic(waits=self._metrics.message_waits)
        self._streams.append(ObservedStream(role, traceparent_of(span), traffic, ended))
        return self._streams[-1]

    def deciding(self, decision: Callable[[], Mapping[str, EventValue]]) -> None:
        """Its proposals begin."""
        self._decision = decision

    def event(self, name: str, attributes: Mapping[str, EventValue]) -> None:
        """Something happened."""
        if (counter := self._metrics.events.get(name)) is not None:
            counter.inc()
        if self._spans is not None:
            self._spans.event(name, attributes)

    def finished(self, error: BaseException | None) -> None:
        """The request ended."""
        now = time.perf_counter()
        outcome = self._outcome(error)
        self._metrics.requests[outcome].inc()
        self._count(now)
        self._metrics.latency.observe(now - self._began)
        if self._counted_tokens:
            self._metrics.request_generation.observe(self._counted_tokens)
        if self._first_token is not None and self._counted_tokens > 1:
            self._metrics.per_token.observe((now - self._first_token) / (self._counted_tokens - 1))
        if self._spans is not None:
            attributes = self._attributes()
            if error is None:
                attributes[names.GEN_AI_RESPONSE_FINISH_REASONS] = [outcome]
            stats = None if self._completion is None else self._completion.stats
            self._spans.finished(stats, attributes, error)

    def round_ended(self, result: RoundResult) -> None:
        """A round ended."""
        timed = result.times
        self._rounds += 1
        if self._first_token is None and result.committed:
            self._first_token = timed.decided
            self._metrics.first_token.observe(timed.decided - self._began)
        if self._rounds == 1:
            self._seconds["prefill"] = timed.decided - timed.requested
            self._metrics.prefill.observe(timed.decided - timed.requested)
        else:
            seconds = self._seconds
            seconds["draft"] += timed.draft
            seconds["verify"] += timed.verify
            seconds["sampling"] += timed.sampling
            seconds["wait"] += timed.wait
            self._metrics.round(timed)
        if self._spans is not None:
            self._spans.round(result, self._decision)
        if timed.decided - self._counted_at >= COUNTING_INTERVAL_SECONDS:
            self._count(timed.decided)

    def _count(self, now: float) -> None:
        """Add everything since the last call to the counters."""
        self._counted_at = now
        for (peer, direction), total in self._bytes().items():
            self._metrics.wire[peer, direction].inc(total - self._counted_bytes[peer, direction])
            self._counted_bytes[peer, direction] = total
        if self._completion is None:
            return
        tokens = self._completion.length - self._prompt_length
        self._metrics.generation_tokens.inc(tokens - self._counted_tokens)
        self._counted_tokens = tokens
        fresh = since(self._completion.stats, self._counted)
        if fresh.rounds:
            add(self._counted, fresh)
            self._metrics.speculated(self._rule, fresh)
            self._recent.add(fresh)

    def _bytes(self) -> dict[tuple[str, str], int]:
        totals = dict.fromkeys(self._counted_bytes, 0)
        for stream in self._streams:
            totals[stream.role, "sent"] += stream.traffic.sent_bytes
            totals[stream.role, "received"] += stream.traffic.received_bytes
        return totals

    def _outcome(self, error: BaseException | None) -> str:
        if error is None:
            reason = None if self._completion is None else self._completion.finish_reason
            return "error" if reason is None else reason.value
        return next((name for kind, name in _OUTCOMES if isinstance(error, kind)), "error")

    def _attributes(self) -> dict[str, EventValue | list[str]]:
        attributes: dict[str, EventValue | list[str]] = {**_seconds(self._seconds)}
        attributes |= {
            f"{names.BYTES}{peer}.{direction}": total for (peer, direction), total in self._bytes().items()
        }
        attributes |= self._decision()
        attributes[names.GEN_AI_USAGE_OUTPUT_TOKENS] = self._counted_tokens
        if self._first_token is not None:
            attributes[names.TIME_TO_FIRST_TOKEN] = round(self._first_token - self._began, 6)
        return attributes


class ObservedStream(StreamObserver):
    """Observes one stream to a service."""

    traffic: Traffic

    def __init__(
        self,
        role: str,
        traceparent: str,
        traffic: Traffic,
        report: Callable[[Traffic, Exception | None], None] | None,
    ) -> None:
        self.role = role
        self.traceparent = traceparent
        self.traffic = traffic
        self._report = report

    def ended(self, error: Exception | None = None) -> None:
        """The stream ended. Only the first call counts."""
        if self._report is not None:
            report, self._report = self._report, None
            report(self.traffic, error)


def _end_stream(span: Span, traffic: Traffic, error: Exception | None) -> None:
    span.set_attributes(
        {
            names.STEPS: traffic.received_messages,
            names.BYTES_SENT: traffic.sent_bytes,
            names.BYTES_RECEIVED: traffic.received_bytes,
        }
    )
    if error is not None:
        mark_error(span, error)
    span.end()


class RequestSpans:
    """The spans of a request: itself, its prefill, a stream each to draft and target, and its rounds when sampled.

    A span costs some twenty microseconds, an event four. So values of every round are added up on the request's own
    span.
    """

    def __init__(self, tracer: Tracer, span: Span, trace_rounds: float) -> None:
        self._tracer = tracer
        self._span = span
        # The sampler uses the other half of the id, so the two ratios are independent.
        is_chosen = (span.get_span_context().trace_id >> 64) / 2**64 < trace_rounds
        self._rounds_left = _MAX_ROUNDS if is_chosen else 0
        self._rounds = 0
        self._events = 0
        self._prefill: Span = INVALID_SPAN
        # Rounds are timed by the performance counter, spans in time since 1970.
        self._offset_seconds = time.time() - time.perf_counter()

    def planned(self, details: Mapping[str, EventValue]) -> None:
        """The request was checked; its prefill begins."""
        model = str(details["model"])
        self._span.update_name(f"{names.TEXT_COMPLETION} {model}")
        self._span.set_attributes(
            {
                names.GEN_AI_REQUEST_MODEL: model,
                names.GEN_AI_RESPONSE_MODEL: model,
                names.GEN_AI_REQUEST_MAX_TOKENS: details["max_tokens"],
                names.GEN_AI_REQUEST_TEMPERATURE: details["temperature"],
                names.GEN_AI_REQUEST_SEED: details["seed"],
                names.GEN_AI_USAGE_INPUT_TOKENS: details["prompt_tokens"],
                names.RULE: details["rule"],
                names.NUM_SPECULATIVE_TOKENS: details["num_speculative_tokens"],
                **{
                    attribute: details[name]
                    for name, attribute in _WHERE_ASKED_FOR.items()
                    if name in details
                },
            }
        )
        self._prefill = self._tracer.start_span("prefill", under(self._span))

    def stream(self, role: str, address: str) -> Span:
        """A stream to a service begins."""
        service, method = METHODS[role]
        host, _, port = address.rpartition(":")
        attributes: dict[str, str | int] = {
            names.RPC_SYSTEM: "grpc",
            names.RPC_SERVICE: service,
            names.RPC_METHOD: method,
            names.SERVER_ADDRESS: host or address,
        }
        if port.isdigit():
            attributes[names.SERVER_PORT] = int(port)
        return self._tracer.start_span(f"{service}/{method}", under(self._span), SpanKind.CLIENT, attributes)

    def round(self, result: RoundResult, decision: Callable[[], Mapping[str, EventValue]] = dict) -> None:
        """A round ended. The first is the prefill; `decision` says why it proposed so much."""
        timed = result.times
        self._rounds += 1
        if self._rounds == 1:
            self._end_prefill(timed)
        if not self._rounds_left:
            return
        self._rounds_left -= 1
        attributes: dict[str, EventValue] = {
            names.ROUND: self._rounds,
            names.DRAFTED_TOKENS: result.proposed,
            names.ACCEPTED_TOKENS: result.accepted,
            **_seconds({phase: getattr(timed, phase) for phase in _PHASES}),
            **decision(),
        }
        if result.awaited_outcome:
            attributes[names.AHEAD_HIT] = result.outcome_rank is not None
            if result.outcome_rank is not None:
                attributes[names.AHEAD_RANK] = result.outcome_rank + 1
        span = self._tracer.start_span(
            "round", under(self._span), attributes=attributes, start_time=self._nanoseconds(timed.began)
        )
        span.end(self._nanoseconds(timed.decided))

    def event(self, name: str, attributes: Mapping[str, EventValue]) -> None:
        """Something happened to the request."""
        self._events += 1
        if self._events <= _MAX_EVENTS:
            self._span.add_event(name, dict(attributes))

    def finished(
        self,
        stats: SpeculationStats | None,
        attributes: Mapping[str, EventValue | list[str]],
        error: BaseException | None,
    ) -> None:
        """The request ended."""
        self._end_prefill(None)
        if stats is not None:
            self._set_stats(stats)
        self._span.set_attributes(attributes)
        if self._events > _MAX_EVENTS:
            self._span.set_attribute(names.EVENTS_DROPPED, self._events - _MAX_EVENTS)
        if isinstance(error, Exception):
            mark_error(self._span, error)
        elif error is not None:
            self._span.set_attribute(names.ERROR_TYPE, "cancelled")
        self._span.end()

    def _set_stats(self, stats: SpeculationStats) -> None:
        self._span.set_attributes(
            {
                names.ROUNDS: stats.rounds,
                names.DRAFTED_TOKENS: stats.drafted,
                names.ACCEPTED_TOKENS: stats.accepted,
                names.ACCEPTANCE_RATE: round(acceptance_rate(stats), 6),
                names.ACCEPTANCE_LENGTH: round(acceptance_length(stats), 6),
                names.TOKENS_PER_PASS: round(tokens_per_pass(stats), 6),
                names.CUMULATIVE_RATES: [round(rate, 6) for rate in cumulative_rates(stats)],
                names.CONDITIONAL_RATES: [round(rate, 6) for rate in conditional_rates(stats)],
            }
        )
        if (ahead := stats.ahead).awaited:
            self._span.set_attributes(
                {
                    names.AHEAD_AWAITED: ahead.awaited,
                    names.AHEAD_HITS: ahead.hits,
                    names.AHEAD_HITS_BY_RANK: ahead.hits_by_rank,
                    names.AHEAD_SAVED: round(ahead.saved_seconds, 6),
                }
            )

    def _end_prefill(self, timed: RoundTimes | None) -> None:
        if self._prefill.is_recording():
            self._prefill.end(None if timed is None else self._nanoseconds(timed.decided))

    def _nanoseconds(self, moment: float) -> int:
        return int((moment + self._offset_seconds) * 1e9)


def _seconds(phases: Mapping[str, float]) -> dict[str, float]:
    return {names.SECONDS + phase: round(seconds, 6) for phase, seconds in phases.items()}
