"""The spans of a scripted request, exactly: one trace over the coordinator and both services."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from coordinator.speculation.controller import RequestSpeculation
from tests.service.fakes import FakeDraft, FakeTarget
from tests.service.scripted_request import (
    COMPLETION,
    REQUEST,
    all_ended,
    only_span,
    value,
    wrong_after_twelve,
)
from tests.service.telemetry_cluster import observed_cluster

TRACE = "0123456789abcdef0123456789abcdef"


SAMPLED = f"00-{TRACE}-00f067aa0ba902b7-01"


UNSAMPLED = f"00-{TRACE}-00f067aa0ba902b7-00"


def tree(spans: Sequence[ReadableSpan]) -> list[object]:
    """Nest the names of the spans by parent, siblings in the order in which they began."""
    ids = {span.context.span_id for span in spans if span.context is not None}

    def below(parent: int | None) -> list[object]:
        children = [
            span
            for span in sorted(spans, key=lambda span: span.start_time or 0)
            if (span.parent.span_id if span.parent and span.parent.span_id in ids else None) == parent
        ]
        return [
            (span.name, span.kind.name, *below(span.context.span_id))
            for span in children
            if span.context is not None
        ]

    return below(None)


async def test_one_trace_holds_the_request_its_streams_and_the_spans_of_the_services() -> None:
    async with observed_cluster(FakeTarget(), FakeDraft(wrong_after_twelve)) as cluster:
        assert await cluster.complete(REQUEST, SAMPLED) == COMPLETION
        await all_ended(cluster, 8)
        spans = cluster.spans
    draft, target = "tandem.v1.DraftService/Propose", "tandem.v1.TargetService/Verify"
    assert tree(spans) == [
        (
            "text_completion fake",
            "SERVER",
            ("prefill", "INTERNAL"),
            (draft, "CLIENT", (draft, "SERVER", ("prefill", "INTERNAL"))),
            (target, "CLIENT", (target, "SERVER", ("prefill", "INTERNAL"))),
        )
    ]
    assert {f"{span.context.trace_id:032x}" for span in spans if span.context} == {TRACE}
    root = only_span("text_completion fake", spans)
    assert root.parent is not None
    assert root.parent.span_id == 0x00F067AA0BA902B7
    assert all(span.status.status_code is StatusCode.UNSET for span in spans)


async def test_the_request_s_span_reports_speculation(monkeypatch: pytest.MonkeyPatch) -> None:
    # The draft drafts nothing ahead, and whether it is asked instead is a matter of measured times.
    monkeypatch.setattr(RequestSpeculation, "tokens_after_miss", lambda _, count: count)
    async with observed_cluster(FakeTarget(), FakeDraft(wrong_after_twelve), draft_ahead=4) as cluster:
        await cluster.complete(REQUEST, SAMPLED)
        await all_ended(cluster, 8)
        attributes = dict(only_span("text_completion fake", cluster.spans).attributes or {})
        sent = value(cluster.coordinator, "wire_bytes_total", peer="target", direction="sent")
    seconds = {name: attributes.pop(name) for name in [*attributes] if "seconds" in name}
    byte_counts = {name: attributes.pop(name) for name in [*attributes] if name.startswith("tandem.bytes.")}
    identity = {attributes.pop("gen_ai.response.id"), attributes.pop("tandem.request_id")}
    assert len(identity) == 1
    assert isinstance(attributes.pop("tandem.decision.predicted_gain"), float)
    assert attributes == {
        "tandem.decision.load": 1,
        "tandem.decision.tokens": 2,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.seed": 3,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 8,
        "tandem.rule": "greedy",
        "tandem.num_speculative_tokens": 2,
        "tandem.rounds": 4,
        "tandem.drafted_tokens": 5,
        "tandem.accepted_tokens": 4,
        "tandem.acceptance_rate": 0.8,
        "tandem.acceptance_length": 1.0,
        "tandem.tokens_per_pass": 2.0,
        "tandem.acceptance_rate_per_position.cumulative": (1.0, 0.5),
        "tandem.acceptance_rate_per_position.conditional": (1.0, 0.5),
        "tandem.ahead.awaited": 2,
        "tandem.ahead.hits": 0,
        "tandem.ahead.hits_by_rank": (),
    }
    assert sorted(seconds) == [
        "tandem.ahead.saved_seconds",
        *(f"tandem.seconds.{phase}" for phase in ("draft", "prefill", "queue", "sampling", "verify", "wait")),
        "tandem.time_to_first_token_seconds",
    ]
    assert all(isinstance(each, float) and 0 <= each < 5 for each in seconds.values())
    assert byte_counts["tandem.bytes.target.sent"] == sent
    assert all(isinstance(count, int) and count > 0 for count in byte_counts.values())


async def test_stream_spans_report_their_steps_and_bytes() -> None:
    async with observed_cluster(FakeTarget(), FakeDraft(wrong_after_twelve)) as cluster:
        await cluster.complete(REQUEST, SAMPLED)
        await all_ended(cluster, 8)
        spans = cluster.spans
    client = only_span("tandem.v1.TargetService/Verify", spans, SpanKind.CLIENT).attributes or {}
    server = only_span("tandem.v1.TargetService/Verify", spans, SpanKind.SERVER).attributes or {}
    assert client["tandem.steps"] == server["tandem.steps"] == 4
    assert server["tandem.tokens"] == 1 + 3 + 3 + 2  # a row for each proposed token and one more
    assert client["server.address"] == "127.0.0.1"
    assert isinstance(client["tandem.bytes.sent"], int)
    draft_server = only_span("tandem.v1.DraftService/Propose", spans, SpanKind.SERVER).attributes or {}
    assert (draft_server["tandem.steps"], draft_server["tandem.tokens"]) == (4, 5)


async def test_an_unsampled_traceparent_makes_no_span() -> None:
    async with observed_cluster(FakeTarget(), FakeDraft()) as cluster:
        assert await cluster.complete(REQUEST, UNSAMPLED) == COMPLETION
        assert value(cluster.coordinator, "generation_tokens_total") == 8
        await asyncio.sleep(0.1)
        assert cluster.spans == ()


async def test_a_ratio_of_zero_traces_only_sampled_callers() -> None:
    async with observed_cluster(FakeTarget(), FakeDraft(), sample_ratio=0.0) as cluster:
        await cluster.complete(REQUEST)
        await asyncio.sleep(0.1)
        assert cluster.spans == ()
        await cluster.complete(REQUEST, SAMPLED)
        await all_ended(cluster, 8)


async def test_an_invalid_traceparent_is_ignored() -> None:
    async with observed_cluster(FakeTarget(), FakeDraft()) as cluster:
        assert await cluster.complete(REQUEST, "00-nonsense") == COMPLETION
        await all_ended(cluster, 8)
        assert only_span("text_completion fake", cluster.spans).parent is None


async def test_trace_rounds_gives_each_round_a_span() -> None:
    async with observed_cluster(FakeTarget(), FakeDraft(wrong_after_twelve), trace_rounds=1.0) as cluster:
        await cluster.complete(REQUEST)
        await all_ended(cluster, 12)
        rounds = [span for span in cluster.spans if span.name == "round"]
        root = only_span("text_completion fake", cluster.spans)
    attributes = [span.attributes or {} for span in rounds]
    assert [
        (each["tandem.round"], each["tandem.drafted_tokens"], each["tandem.accepted_tokens"])
        for each in attributes
    ] == [(1, 0, 0), (2, 2, 2), (3, 2, 1), (4, 1, 1)]
    assert {span.parent.span_id for span in rounds if span.parent} == {
        root.context.span_id if root.context else 0
    }
    ends = [span.end_time or 0 for span in rounds]
    begins = [span.start_time or 0 for span in rounds]
    assert ends == sorted(ends)
    assert begins[1:] == ends[:-1]  # rounds leave no gap
