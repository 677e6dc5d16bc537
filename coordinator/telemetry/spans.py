"""The span tree of a request: itself, its prefill, a stream each to draft and target, and its rounds when sampled.

A span costs some twenty microseconds, an event four, and a span keeps 128 events. So values of every round are added up
on the request's own span.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Tracer

from coordinator.stats.rounds import RoundResult, RoundTimes
from coordinator.stats.speculation import (
    acceptance_length,
    acceptance_rate,
    conditional_rates,
    cumulative_rates,
    tokens_per_pass,
)
from coordinator.telemetry.observer import EventValue
from tandem.rpc.channels import Traffic
from tandem.telemetry import attributes as names
from tandem.telemetry.spans import context_of, mark_error, traceparent_of, under
from tandem.types import SpeculationStats

_MAX_EVENTS = 64
_MAX_ROUNDS = 1_000
"""Maximum number of rounds of a request with a span, so that no request keeps the exporter's queue full."""
_WHERE_ASKED_FOR = {"top_p": names.GEN_AI_REQUEST_TOP_P, "top_k": names.GEN_AI_REQUEST_TOP_K}
_METHODS = {"draft": ("tandem.v1.DraftService", "Propose"), "target": ("tandem.v1.TargetService", "Verify")}


class RequestSpans:
    """The spans of one request."""

    def __init__(self, tracer: Tracer, request_id: str, traceparent: str, trace_rounds: float) -> None:
        self._tracer = tracer
        self._span = tracer.start_span(
            names.TEXT_COMPLETION,
            context_of(traceparent),
            SpanKind.SERVER,
            {
                names.GEN_AI_OPERATION: names.TEXT_COMPLETION,
                names.GEN_AI_PROVIDER: names.PROVIDER,
                names.GEN_AI_RESPONSE_ID: request_id,
                names.REQUEST_ID: request_id,
            },
        )
        self.is_recorded = self._span.is_recording()
        """True if the request was sampled."""
        self.traceparent = traceparent_of(self._span)
        # The sampler uses the other half of the id, so the two ratios are independent.
        is_chosen = (self._span.get_span_context().trace_id >> 64) / 2**64 < trace_rounds
        self._rounds_left = _MAX_ROUNDS if self.is_recorded and is_chosen else 0
        self._rounds = 0
        self._events = 0
        self._prefill: Span = INVALID_SPAN
        # Rounds are timed by the performance counter, spans in time since 1970.
        self._offset_seconds = time.time() - time.perf_counter()

    def planned(self, details: Mapping[str, EventValue]) -> None:
        """The request was checked; its prefill begins."""
        if not self.is_recorded:
            return
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
            }
        )
        for name, attribute in _WHERE_ASKED_FOR.items():
            if name in details:
                self._span.set_attribute(attribute, details[name])
        self._prefill = self._tracer.start_span("prefill", under(self._span))

    def stream(self, role: str, address: str) -> Span:
        """A stream to a service begins."""
        if not self.is_recorded:
            return self._span
        service, method = _METHODS[role]
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

    def stream_ended(self, span: Span, traffic: Traffic, error: Exception | None) -> None:
        """It is over."""
        if not self.is_recorded:
            return
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
            **_seconds(wait=timed.wait, draft=timed.draft, verify=timed.verify, sampling=timed.sampling),
            **_outcome(result),
            **decision(),
        }
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
        attributes: Mapping[str, EventValue],
        error: BaseException | None,
    ) -> None:
        """The request ended."""
        if not self.is_recorded:
            return
        self._end_prefill(None)
        if stats is not None:
            self._notify_stats(stats)
        self._span.set_attributes(attributes)
        if self._events > _MAX_EVENTS:
            self._span.set_attribute(names.EVENTS_DROPPED, self._events - _MAX_EVENTS)
        if isinstance(error, Exception):
            mark_error(self._span, error)
        elif error is not None:
            self._span.set_attribute(names.ERROR_TYPE, "cancelled")
        self._span.end()

    def finish_reason(self, reason: str) -> None:
        """How the completion ended."""
        self._span.set_attribute(names.GEN_AI_RESPONSE_FINISH_REASONS, [reason])

    def _notify_stats(self, stats: SpeculationStats) -> None:
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


def _seconds(**phases: float) -> dict[str, float]:
    return {names.SECONDS + phase: round(seconds, 6) for phase, seconds in phases.items()}


def _outcome(result: RoundResult) -> dict[str, EventValue]:
    """Attributes for drafting ahead of a round; none where the draft was not asked to."""
    if not result.awaited_outcome:
        return {}
    rank = result.outcome_rank
    return {names.AHEAD_HIT: False} if rank is None else {names.AHEAD_HIT: True, names.AHEAD_RANK: rank + 1}
