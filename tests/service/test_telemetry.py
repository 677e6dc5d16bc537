"""The metrics of a scripted request, exactly."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc.aio
import pytest
from opentelemetry.trace import SpanKind, StatusCode

from coordinator.telemetry import observed
from tandem.types import GenerationRequest
from tests.service.clients import until
from tests.service.fakes import FakeDraft, FakeTarget
from tests.service.scripted_request import (
    COMPLETION,
    REQUEST,
    all_ended,
    only_span,
    value,
    wrong_after_eleven,
    wrong_after_twelve,
)
from tests.service.telemetry_cluster import observed_cluster


@pytest.mark.parametrize("interval_seconds", [1.0, 0.0], ids=["counted at the end", "counted in each round"])
async def test_metrics_count_every_round_of_a_scripted_request(
    monkeypatch: pytest.MonkeyPatch, interval_seconds: float
) -> None:
    monkeypatch.setattr(observed, "COUNTING_INTERVAL_SECONDS", interval_seconds)
    async with observed_cluster(FakeTarget(), FakeDraft(wrong_after_twelve)) as cluster:
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
        attributes = only_span("text_completion fake", cluster.spans).attributes or {}
        for peer in ("draft", "target"):
            for direction in ("sent", "received"):
                counted = value(of, "wire_bytes_total", peer=peer, direction=direction)
                assert counted == attributes[f"tandem.bytes.{peer}.{direction}"]


async def test_tokens_after_a_rejection_count_as_drafted_but_not_as_reached() -> None:
    async with observed_cluster(FakeTarget(), FakeDraft(wrong_after_eleven)) as cluster:
        assert await cluster.complete(REQUEST) == COMPLETION
        await all_ended(cluster, 8)
        of = cluster.coordinator
        for position, (drafted, reached, accepted) in enumerate([(3, 3, 2), (3, 2, 2)], start=1):
            at = {"position": str(position)}
            assert value(of, "spec_decode_num_draft_tokens_per_pos_total", **at) == drafted
            assert value(of, "spec_decode_num_reached_tokens_per_pos_total", **at) == reached
            assert value(of, "spec_decode_num_accepted_tokens_per_pos_total", **at) == accepted
        attributes = only_span("text_completion fake", cluster.spans).attributes or {}
    assert attributes["tandem.acceptance_rate_per_position.cumulative"] == (0.666667, 0.666667)
    assert attributes["tandem.acceptance_rate_per_position.conditional"] == (0.666667, 1.0)


async def test_services_count_their_streams_and_steps() -> None:
    async with observed_cluster(FakeTarget(), FakeDraft(wrong_after_twelve)) as cluster:
        await cluster.complete(REQUEST)
        await all_ended(cluster, 8)
        for registry, role in ((cluster.draft, "draft"), (cluster.target, "target")):
            assert value(registry, "streams_total", role=role, outcome="finished") == 1
            assert value(registry, "streams_total", role=role, outcome="cancelled") == 0
            assert value(registry, "stream_step_seconds_count", role=role) == 4
            assert value(registry, "num_streams_running", role=role) == 0


async def test_the_same_request_twice_counts_twice_the_bytes() -> None:
    async with observed_cluster(FakeTarget(), FakeDraft(wrong_after_twelve)) as cluster:
        counts = []
        for _ in range(2):
            await cluster.complete(REQUEST)
            counts.append(value(cluster.coordinator, "wire_bytes_total", peer="draft", direction="received"))
    first, both = counts
    assert first
    assert both == 2 * first


async def test_a_lost_draft_is_an_event_of_the_span_and_counts_as_a_fallback() -> None:
    class Dying(FakeDraft):
        def proposal(self, tokens: Sequence[int], count: int):  # type: ignore[no-untyped-def]
            if len(tokens) > 6:
                raise ValueError("the draft breaks")
            return super().proposal(tokens, count)

    async with observed_cluster(FakeTarget(), Dying()) as cluster:
        assert await cluster.complete(REQUEST) == COMPLETION
        await until(lambda: any(span.name.startswith("text") for span in cluster.spans), 5.0)
        lost = value(cluster.coordinator, "fallbacks_total", kind="draft_lost")
        root = only_span("text_completion fake", cluster.spans)
        client_streams = [
            s for s in cluster.spans if s.name.endswith("Propose") and s.kind is SpanKind.CLIENT
        ]
        failed = value(cluster.draft, "streams_total", role="draft", outcome="internal")
    events = [event.name for event in root.events]
    assert lost
    assert events.count("draft_lost") == lost
    assert failed == lost
    assert client_streams[0].status.status_code is StatusCode.ERROR
    assert root.status.status_code is StatusCode.UNSET  # the client lost nothing


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
    async with observed_cluster(FakeTarget(), FakeDraft()) as cluster:
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
    async with observed_cluster(target, FakeDraft()) as cluster:
        task = asyncio.create_task(cluster.complete(GenerationRequest((5, 6, 7), max_tokens=60)))
        await until(lambda: target.longest > 5, 5.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: value(cluster.coordinator, "requests_total", outcome="cancelled") == 1, 5.0)
        await until(
            lambda: value(cluster.target, "streams_total", role="target", outcome="cancelled") == 1, 5.0
        )
        await all_ended(cluster, 8)
        root = only_span("text_completion fake", cluster.spans)
        for registry, role in ((cluster.draft, "draft"), (cluster.target, "target")):
            assert value(registry, "num_streams_running", role=role) == 0
    attributes = root.attributes or {}
    assert attributes["error.type"] == "cancelled"
    assert attributes["gen_ai.usage.output_tokens"] == value(cluster.coordinator, "generation_tokens_total")
