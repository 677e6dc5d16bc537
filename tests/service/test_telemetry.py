"""What a scripted request leaves in traces and metrics, to the last number."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc.aio
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client import CollectorRegistry

from coordinator.telemetry import observed
from tandem.types import GenerationRequest
from tests.service.clients import until
from tests.service.fakes import FakeDraft, FakeTarget, counting
from tests.service.telemetry_cluster import Watched, watched

REQUEST = GenerationRequest((5, 6, 7), max_tokens=8, temperature=0.0, seed=3)
# The target counts: 8, then 9 10 accepted and 11, then 12 accepted and 13 in place of what the draft says, then 14
# accepted (there is room for no more) and 15.
COMPLETION = [8, 9, 10, 11, 12, 13, 14, 15]
TRACE = "0123456789abcdef0123456789abcdef"
SAMPLED = f"00-{TRACE}-00f067aa0ba902b7-01"
UNSAMPLED = f"00-{TRACE}-00f067aa0ba902b7-00"
MODEL = {"model_name": "fake"}


def wrong_after_twelve(tokens: Sequence[int]) -> int:
    return 0 if tokens[-1] == 12 else counting(tokens)


def wrong_after_eleven(tokens: Sequence[int]) -> int:
    return 0 if tokens[-1] == 11 else counting(tokens)


def tree(spans: Sequence[ReadableSpan]) -> list[object]:
    """Names of the spans by parent, brothers in the order in which they began."""
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


def the(name: str, spans: Sequence[ReadableSpan], kind: SpanKind | None = None) -> ReadableSpan:
    (span,) = (span for span in spans if span.name == name and kind in (None, span.kind))
    return span


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"tandem_{name}", MODEL | labels)


async def all_ended(cluster: Watched, count: int) -> None:
    await until(lambda: len(cluster.spans) >= count, 5.0, lambda: str([span.name for span in cluster.spans]))


async def test_one_trace_holds_the_request_its_streams_and_what_the_services_did() -> None:
    async with watched(FakeTarget(), FakeDraft(wrong_after_twelve)) as cluster:
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
    root = the("text_completion fake", spans)
    assert root.parent is not None
    assert root.parent.span_id == 0x00F067AA0BA902B7
    assert all(span.status.status_code is StatusCode.UNSET for span in spans)


async def test_the_request_s_span_tells_what_speculation_did() -> None:
    async with watched(FakeTarget(), FakeDraft(wrong_after_twelve), draft_ahead=4) as cluster:
        await cluster.complete(REQUEST, SAMPLED)
        await all_ended(cluster, 8)
        told = dict(the("text_completion fake", cluster.spans).attributes or {})
        sent = value(cluster.coordinator, "wire_bytes_total", peer="target", direction="sent")
    seconds = {name: told.pop(name) for name in [*told] if "seconds" in name}
    byte_counts = {name: told.pop(name) for name in [*told] if name.startswith("tandem.bytes.")}
    identity = {told.pop("gen_ai.response.id"), told.pop("tandem.request_id")}
    assert len(identity) == 1
    assert isinstance(told.pop("tandem.decision.predicted_gain"), float)
    assert told == {
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


async def test_streams_tell_their_steps_and_bytes() -> None:
    async with watched(FakeTarget(), FakeDraft(wrong_after_twelve)) as cluster:
        await cluster.complete(REQUEST, SAMPLED)
        await all_ended(cluster, 8)
        spans = cluster.spans
    asked = the("tandem.v1.TargetService/Verify", spans, SpanKind.CLIENT).attributes or {}
    answered = the("tandem.v1.TargetService/Verify", spans, SpanKind.SERVER).attributes or {}
    assert asked["tandem.steps"] == answered["tandem.steps"] == 4
    assert answered["tandem.tokens"] == 1 + 3 + 3 + 2  # a row for each proposed token and one more
    assert asked["server.address"] == "127.0.0.1"
    assert isinstance(asked["tandem.bytes.sent"], int)
    drafted = the("tandem.v1.DraftService/Propose", spans, SpanKind.SERVER).attributes or {}
    assert (drafted["tandem.steps"], drafted["tandem.tokens"]) == (4, 5)


@pytest.mark.parametrize("interval_seconds", [1.0, 0.0], ids=["counted at its end", "counted in each round"])
async def test_metrics_of_a_scripted_request(
    monkeypatch: pytest.MonkeyPatch, interval_seconds: float
) -> None:
    monkeypatch.setattr(observed, "COUNTING_INTERVAL_SECONDS", interval_seconds)
    async with watched(FakeTarget(), FakeDraft(wrong_after_twelve)) as cluster:
        await cluster.complete(REQUEST)
        await all_ended(cluster, 8)
        of = cluster.coordinator
        rule = {"rule": "greedy"}
        assert value(of, "spec_decode_num_rounds_total", **rule) == 4
        assert value(of, "spec_decode_num_drafts_total", **rule) == 3
        assert value(of, "spec_decode_num_draft_tokens_total", **rule) == 5
        assert value(of, "spec_decode_num_accepted_tokens_total", **rule) == 4
        for position, (drafted, reached, accepted) in enumerate([(3, 3, 3), (2, 2, 1)], start=1):
            at = {"position": str(position)}
            assert value(of, "spec_decode_num_draft_tokens_per_pos_total", **at) == drafted
            assert value(of, "spec_decode_num_reached_tokens_per_pos_total", **at) == reached
            assert value(of, "spec_decode_num_accepted_tokens_per_pos_total", **at) == accepted
        assert value(of, "spec_decode_acceptance_rate") == 0.8
        assert value(of, "spec_decode_avg_acceptance_length") == 1.0
        assert value(of, "spec_decode_acceptance_rate_per_position", position="2") == 0.5
        assert value(of, "requests_total", outcome="length") == 1
        assert value(of, "requests_total", outcome="stop") == 0
        assert value(of, "prompt_tokens_total") == 3
        assert value(of, "generation_tokens_total") == 8
        assert value(of, "time_to_first_token_seconds_count") == 1
        assert value(of, "inter_token_latency_seconds_count") == 3
        assert value(of, "request_time_per_output_token_seconds_count") == 1
        assert value(of, "request_generation_tokens_sum") == 8
        for phase in ("draft", "verify", "sampling", "wait"):
            assert value(of, "round_phase_seconds_count", phase=phase) == 3
        assert value(of, "num_requests_running") == 0
        assert value(of, "replicas", role="draft", state="ready") == 1
        assert value(of, "replicas", role="draft", state="down") == 0
        assert value(of, "fallbacks_total", kind="draft_lost") == 0
        told = the("text_completion fake", cluster.spans).attributes or {}
        for peer in ("draft", "target"):
            for direction in ("sent", "received"):
                counted = value(of, "wire_bytes_total", peer=peer, direction=direction)
                assert counted == told[f"tandem.bytes.{peer}.{direction}"]


async def test_a_token_behind_a_rejected_one_was_proposed_and_never_reached() -> None:
    async with watched(FakeTarget(), FakeDraft(wrong_after_eleven)) as cluster:
        assert await cluster.complete(REQUEST) == COMPLETION
        await all_ended(cluster, 8)
        of = cluster.coordinator
        for position, (drafted, reached, accepted) in enumerate([(3, 3, 2), (3, 2, 2)], start=1):
            at = {"position": str(position)}
            assert value(of, "spec_decode_num_draft_tokens_per_pos_total", **at) == drafted
            assert value(of, "spec_decode_num_reached_tokens_per_pos_total", **at) == reached
            assert value(of, "spec_decode_num_accepted_tokens_per_pos_total", **at) == accepted
        told = the("text_completion fake", cluster.spans).attributes or {}
    assert told["tandem.acceptance_rate_per_position.cumulative"] == (0.666667, 0.666667)
    assert told["tandem.acceptance_rate_per_position.conditional"] == (0.666667, 1.0)


async def test_metrics_of_the_services() -> None:
    async with watched(FakeTarget(), FakeDraft(wrong_after_twelve)) as cluster:
        await cluster.complete(REQUEST)
        await all_ended(cluster, 8)
        for registry, role in ((cluster.draft, "draft"), (cluster.target, "target")):
            assert value(registry, "streams_total", role=role, outcome="finished") == 1
            assert value(registry, "streams_total", role=role, outcome="cancelled") == 0
            assert value(registry, "stream_step_seconds_count", role=role) == 4
            assert value(registry, "num_streams_running", role=role) == 0


async def test_bytes_are_those_of_the_messages() -> None:
    """Twice the same request is twice the bytes, with and without a trace, but for the trace's own 55."""
    async with watched(FakeTarget(), FakeDraft(wrong_after_twelve)) as cluster:
        counts = []
        for _ in range(2):
            await cluster.complete(REQUEST)
            counts.append(value(cluster.coordinator, "wire_bytes_total", peer="draft", direction="received"))
    first, both = counts
    assert first
    assert both == 2 * first


async def test_a_caller_that_does_not_trace_costs_no_span() -> None:
    async with watched(FakeTarget(), FakeDraft()) as cluster:
        assert await cluster.complete(REQUEST, UNSAMPLED) == COMPLETION
        assert value(cluster.coordinator, "generation_tokens_total") == 8
        await asyncio.sleep(0.1)
        assert cluster.spans == ()


async def test_a_ratio_of_zero_traces_only_those_whose_callers_do() -> None:
    async with watched(FakeTarget(), FakeDraft(), sample_ratio=0.0) as cluster:
        await cluster.complete(REQUEST)
        await asyncio.sleep(0.1)
        assert cluster.spans == ()
        await cluster.complete(REQUEST, SAMPLED)
        await all_ended(cluster, 8)


async def test_a_traceparent_that_is_none_is_ignored() -> None:
    async with watched(FakeTarget(), FakeDraft()) as cluster:
        assert await cluster.complete(REQUEST, "00-nonsense") == COMPLETION
        await all_ended(cluster, 8)
        assert the("text_completion fake", cluster.spans).parent is None


async def test_each_round_has_a_span_when_asked_for() -> None:
    async with watched(FakeTarget(), FakeDraft(wrong_after_twelve), trace_rounds=1.0) as cluster:
        await cluster.complete(REQUEST)
        await all_ended(cluster, 12)
        rounds = [span for span in cluster.spans if span.name == "round"]
        root = the("text_completion fake", cluster.spans)
    told = [span.attributes or {} for span in rounds]
    assert [
        (each["tandem.round"], each["tandem.drafted_tokens"], each["tandem.accepted_tokens"]) for each in told
    ] == [(1, 0, 0), (2, 2, 2), (3, 2, 1), (4, 1, 1)]
    assert {span.parent.span_id for span in rounds if span.parent} == {
        root.context.span_id if root.context else 0
    }
    ends = [span.end_time or 0 for span in rounds]
    begins = [span.start_time or 0 for span in rounds]
    assert ends == sorted(ends)
    assert begins[1:] == ends[:-1]  # they leave no gap


async def test_a_lost_draft_is_an_event_and_a_fallback() -> None:
    class Dying(FakeDraft):
        def proposal(self, tokens: Sequence[int], count: int):  # type: ignore[no-untyped-def]
            if len(tokens) > 6:
                raise ValueError("the draft breaks")
            return super().proposal(tokens, count)

    async with watched(FakeTarget(), Dying()) as cluster:
        assert await cluster.complete(REQUEST) == COMPLETION
        await until(lambda: any(span.name.startswith("text") for span in cluster.spans), 5.0)
        lost = value(cluster.coordinator, "fallbacks_total", kind="draft_lost")
        root = the("text_completion fake", cluster.spans)
        asked = [s for s in cluster.spans if s.name.endswith("Propose") and s.kind is SpanKind.CLIENT]
        failed = value(cluster.draft, "streams_total", role="draft", outcome="internal")
    events = [event.name for event in root.events]
    assert lost
    assert events.count("draft_lost") == lost
    assert failed == lost
    assert asked[0].status.status_code is StatusCode.ERROR
    assert root.status.status_code is StatusCode.UNSET  # the client has lost nothing


@pytest.mark.parametrize(
    ("request_", "outcome", "status"),
    [
        (
            GenerationRequest((5, 6, 7), max_tokens=8, temperature=-1.0),
            "invalid",
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (GenerationRequest((), max_tokens=8), "invalid", grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_a_refused_request_is_counted_with_its_outcome(
    request_: GenerationRequest, outcome: str, status: grpc.StatusCode
) -> None:
    async with watched(FakeTarget(), FakeDraft()) as cluster:
        with pytest.raises(grpc.aio.AioRpcError):
            await cluster.complete(request_)
        assert value(cluster.coordinator, "requests_total", outcome=outcome) == 1
        await all_ended(cluster, 1)
        (span,) = cluster.spans
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == status.name.lower()


async def test_a_cancelled_request_is_counted_and_its_spans_end() -> None:
    target = FakeTarget()
    target.step_seconds = 0.02
    async with watched(target, FakeDraft()) as cluster:
        task = asyncio.create_task(cluster.complete(GenerationRequest((5, 6, 7), max_tokens=60)))
        await until(lambda: target.longest > 5, 5.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: value(cluster.coordinator, "requests_total", outcome="cancelled") == 1, 5.0)
        await until(
            lambda: value(cluster.target, "streams_total", role="target", outcome="cancelled") == 1, 5.0
        )
        await all_ended(cluster, 8)
        root = the("text_completion fake", cluster.spans)
        for registry, role in ((cluster.draft, "draft"), (cluster.target, "target")):
            assert value(registry, "num_streams_running", role=role) == 0
    told = root.attributes or {}
    assert told["error.type"] == "cancelled"
    assert told["gen_ai.usage.output_tokens"] == value(cluster.coordinator, "generation_tokens_total")
