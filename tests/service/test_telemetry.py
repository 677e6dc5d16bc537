"""The metrics and spans of a scripted request, exactly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from tandem.engine.interface import KvUsage
from tandem.model.types import (
    DraftedOutcomes,
    GenerationRequest,
    ModelInfo,
    Proposal,
    ProposeStep,
    Verification,
    VerifyStep,
)
from tandem.serving.interceptors import Context
from tandem.telemetry.process import OtlpExports
from tandem.telemetry.service import ObservedService
from tandem.telemetry.settings import TelemetryOptions
from tandem.v1 import generation_pb2_grpc
from tandem.v1.target_pb2 import TargetServiceGetModelInfoRequest, TargetServiceGetModelInfoResponse
from tandem.wire.generation import chunk_from_proto, request_to_proto
from tandem_coordinator.controller import DraftAhead, RequestController
from tandem_coordinator.telemetry.observed import ObservedRequests
from tandem_coordinator.transport.target_client import TargetClient
from tandem_draft.servicer import DraftServicer
from tandem_target.servicer import TargetServicer
from tests.paths import DEMO_TARGET
from tests.service.clients import until
from tests.service.fakes import (
    FakeDraft,
    FakeTarget,
    Served,
    coordinator,
    counting,
    paced,
    serving,
    settings_for,
)

CONVENTIONS = json.loads(
    (Path(__file__).parents[1] / "unit/tandem/telemetry/gen_ai_conventions.json").read_text()
)
"""See `tests.unit.tandem.telemetry.test_process`."""


class MemoryExports(OtlpExports):
    """Keeps spans instead of sending them."""

    def __init__(self, memory: InMemorySpanExporter) -> None:
        provider = TracerProvider(sampler=ParentBased(ALWAYS_ON), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(memory))
        self.tracer = provider.get_tracer("tests")

    def start(self) -> None:
        pass

    def close(self, deadline: float) -> None:
        pass


class Scripted:
    """A verifier or a proposer that answers what a fake answers, and a sequence of it."""

    pushed = None
    is_full = False
    waits_for_pages = False
    overdue_seconds = 0.0
    tokenizer_files = (DEMO_TARGET / "tokenizer.json",)

    def __init__(self, fake: Any) -> None:
        self._fake = fake
        self._tokens: list[int] = []
        self.model_info: ModelInfo = fake.model_info

    @asynccontextmanager
    async def sequence(self, *_: object) -> AsyncIterator[Scripted]:
        yield Scripted(self._fake)

    def kv_usage(self) -> KvUsage:
        """That of the fake."""
        usage: KvUsage = self._fake.kv_usage()
        return usage

    async def propose(self, step: ProposeStep) -> Proposal:
        self._fake.apply(self._tokens, step.delta)
        proposal: Proposal = self._fake.proposal(self._tokens, step.token_count)
        return proposal

    def confirms(self, step: VerifyStep) -> bool:
        """No: it never goes on by itself."""
        return False

    async def verify(self, step: VerifyStep) -> Verification:
        self._fake.apply(self._tokens, step.delta)
        verification: Verification = await self._fake.verified(self._tokens, step)
        return verification

    def expect(self, drafted: DraftedOutcomes) -> None:
        """Ignore it, likewise."""

    def keep(self, token_count: int) -> None:
        """Forget it: nothing is written down at the end."""


@dataclass(frozen=True, slots=True)
class ObservedCluster:
    """A cluster with its metrics and spans."""

    address: str
    coordinator: CollectorRegistry
    draft: CollectorRegistry
    target: CollectorRegistry
    memory: InMemorySpanExporter

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.memory.get_finished_spans()

    async def complete(self, request: GenerationRequest, traceparent: str = "") -> list[int]:
        """Complete the request in this trace context, and return the tokens."""
        metadata = (("traceparent", traceparent),) if traceparent else ()
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            call = stub.Generate(request_to_proto(request), metadata=metadata)
            return [token async for chunk in call for token in chunk_from_proto(chunk).token_ids]


@asynccontextmanager
async def observed_cluster(
    target: FakeTarget, draft: FakeDraft, *, draft_ahead: DraftAhead = "off"
) -> AsyncIterator[ObservedCluster]:
    """Run a coordinator, a target and a draft in this process, each with telemetry."""
    memory = InMemorySpanExporter()
    exports = MemoryExports(memory)
    options = TelemetryOptions()
    async with AsyncExitStack() as stack:
        target_observer = ObservedService(options, "target", exports)
        verifying = TargetServicer(target_observer)
        verifying.verifier = Scripted(target)  # type: ignore[assignment]
        target_observer.ready(target.model_info.name, lambda: None)
        draft_observer = ObservedService(options, "draft", exports)
        drafting = DraftServicer(draft_observer)
        draft.model_info = replace(draft.model_info, drafts_ahead=True)
        drafting.proposer = Scripted(draft)  # type: ignore[assignment]
        draft_observer.ready(draft.model_info.name, lambda: None)
        target_address, _ = await stack.enter_async_context(serving(verifying))
        draft_address, _ = await stack.enter_async_context(serving(drafting))
        settings = settings_for(target_address, draft_address, draft_ahead=draft_ahead)
        observer = ObservedRequests(settings, exports)
        address, _ = await stack.enter_async_context(coordinator(settings, observer))
        yield ObservedCluster(
            address, observer.registry, draft_observer.registry, target_observer.registry, memory
        )


REQUEST = GenerationRequest((5, 6, 7), max_tokens=8, temperature=0.0, seed=3)
# With `wrong_after_twelve` the rounds are: 8; 9 and 10 accepted, bonus 11; 12 accepted, 13 recovered; 14 accepted (the
# length leaves no room for more), bonus 15.
COMPLETION = [8, 9, 10, 11, 12, 13, 14, 15]
MODEL = {"model_name": "fake"}


def wrong_after_twelve(tokens: Sequence[int]) -> int:
    """Count along with the target, except after 12."""
    return 0 if tokens[-1] == 12 else counting(tokens)


def only_span(name: str, spans: Sequence[ReadableSpan], kind: SpanKind | None = None) -> ReadableSpan:
    (span,) = (span for span in spans if span.name == name and kind in (None, span.kind))
    return span


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    """Return the sample of this metric of the fake model, None where there is none."""
    return registry.get_sample_value(f"tandem_{name}", MODEL | labels)


async def all_ended(cluster: ObservedCluster, count: int) -> None:
    await until(lambda: len(cluster.spans) >= count, 5.0, lambda: str([span.name for span in cluster.spans]))


async def test_metrics_count_every_round_of_a_scripted_request() -> None:
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
        # One of three proposals, the last of which is too short for it
        assert value(of, "spec_decode_acceptance_rate_per_position", position="2") == pytest.approx(1 / 3)
        assert value(of, "requests_total", outcome="length") == 1
        assert value(of, "requests_total", outcome="stop") == 0
        assert value(of, "prompt_tokens_total") == 3
        assert value(of, "generation_tokens_total") == 8
        assert value(of, "time_to_first_token_seconds_count", operation="text_completion") == 1
        assert value(of, "time_to_first_token_seconds_count", operation="chat") == 0
        assert value(of, "inter_token_latency_seconds_count") == 3
        assert value(of, "request_time_per_output_token_seconds_count", operation="text_completion") == 1
        assert value(of, "request_inference_time_seconds_count") == 1
        assert value(of, "request_decode_time_seconds_count") == 1
        assert value(of, "request_params_max_tokens_sum") == 8
        assert value(of, "spec_decode_accepted_tokens_sum", proposal_length="2") is not None
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

        for registry, role in ((cluster.draft, "draft"), (cluster.target, "target")):
            assert value(registry, "streams_total", role=role, outcome="finished") == 1
            assert value(registry, "streams_total", role=role, outcome="cancelled") == 0
            assert value(registry, "stream_step_seconds_count", role=role) == 4
            assert value(registry, "num_streams_running", role=role) == 0


async def test_a_lost_draft_is_an_event_of_the_span_and_counts_as_a_fallback() -> None:
    class Dying(FakeDraft):
        def proposal(self, tokens: Sequence[int], count: int):  # type: ignore[no-untyped-def]
            if len(tokens) > 6:
                raise ValueError("the draft breaks")
            return super().proposal(tokens, count)

    async with observed_cluster(FakeTarget(), Dying()) as cluster:
        assert await cluster.complete(REQUEST) == COMPLETION
        await until(lambda: any(span.name.startswith("text") for span in cluster.spans))
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


async def test_a_refused_request_is_counted_with_its_outcome() -> None:
    async with observed_cluster(FakeTarget(), FakeDraft()) as cluster:
        with pytest.raises(grpc.aio.AioRpcError):
            await cluster.complete(GenerationRequest((), max_tokens=8))
        assert value(cluster.coordinator, "requests_total", outcome="invalid") == 1
        labels = {"operation": "text_completion", "error_type": "invalid_argument"}
        assert value(cluster.coordinator, "e2e_request_latency_seconds_count", **labels) == 1
        await all_ended(cluster, 1)
        (span,) = cluster.spans
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "invalid_argument"


async def test_a_cancelled_request_is_counted_and_its_spans_end() -> None:
    target = paced(0.02)
    async with observed_cluster(target, FakeDraft()) as cluster:
        task = asyncio.create_task(cluster.complete(GenerationRequest((5, 6, 7), max_tokens=60)))
        await until(lambda: target.longest > 5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: value(cluster.coordinator, "requests_total", outcome="cancelled") == 1)
        await until(lambda: value(cluster.target, "streams_total", role="target", outcome="cancelled") == 1)
        await all_ended(cluster, 8)
        root = only_span("text_completion fake", cluster.spans)
        assert value(cluster.coordinator, "requests_total", outcome="aborted") == 0
        for registry, role in ((cluster.draft, "draft"), (cluster.target, "target")):
            assert value(registry, "num_streams_running", role=role) == 0
    attributes = root.attributes or {}
    assert attributes["error.type"] == "cancelled"
    assert attributes["gen_ai.usage.output_tokens"] == value(cluster.coordinator, "generation_tokens_total")


TRACE = "0123456789abcdef0123456789abcdef"
SAMPLED = f"00-{TRACE}-00f067aa0ba902b7-01"
UNSAMPLED = f"00-{TRACE}-00f067aa0ba902b7-00"


async def test_spans_report_speculation_steps_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    # The draft drafts nothing ahead, and whether it is asked instead is a matter of measured times.
    monkeypatch.setattr(RequestController, "tokens_after_miss", lambda _, count: count)
    async with observed_cluster(FakeTarget(), FakeDraft(wrong_after_twelve), draft_ahead=4) as cluster:
        await cluster.complete(replace(REQUEST, top_k=3), SAMPLED)
        await all_ended(cluster, 8)
        spans = cluster.spans
        attributes = dict(only_span("text_completion fake", spans).attributes or {})
        sent = value(cluster.coordinator, "wire_bytes_total", peer="target", direction="sent")
    assert {name for name in attributes if name.startswith("gen_ai.")} <= CONVENTIONS["attributes"].keys()
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
        "gen_ai.request.top_k": 3,
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
        "tandem.acceptance_rate_per_position.cumulative": (1.0, 0.333333),
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
    client = only_span("tandem.v1.TargetService/Verify", spans, SpanKind.CLIENT).attributes or {}
    server = only_span("tandem.v1.TargetService/Verify", spans, SpanKind.SERVER).attributes or {}
    assert client["tandem.steps"] == server["tandem.steps"] == 4
    assert server["tandem.tokens"] == 1 + 3 + 3 + 2  # a row for each proposed token and one more
    assert client["server.address"] == "127.0.0.1"
    assert isinstance(client["tandem.bytes.sent"], int)
    draft_server = only_span("tandem.v1.DraftService/Propose", spans, SpanKind.SERVER).attributes or {}
    assert (draft_server["tandem.steps"], draft_server["tandem.tokens"]) == (4, 5)


async def test_only_sampled_requests_make_spans() -> None:
    """All spans of a request that a caller samples come after those that an earlier one could have made."""
    async with observed_cluster(FakeTarget(), FakeDraft()) as cluster:
        assert await cluster.complete(REQUEST, UNSAMPLED) == COMPLETION
        assert value(cluster.coordinator, "generation_tokens_total") == 8
        await cluster.complete(REQUEST, SAMPLED)
        await all_ended(cluster, 8)
        assert {span.context.trace_id for span in cluster.spans if span.context} == {int(TRACE, 16)}
        assert len([span for span in cluster.spans if span.name == "text_completion fake"]) == 1


@asynccontextmanager
async def scraped(target: str) -> AsyncIterator[Callable[[str], Awaitable[float | None]]]:
    """Run a coordinator over this target; yield what reads one of its metrics of the first engine as a client does."""
    settings = settings_for(target)
    observer = ObservedRequests(settings)
    async with coordinator(settings, observer) as (_, service):

        async def read(name: str) -> float | None:
            text = await service.metrics()
            assert text is not None
            at = MODEL | {"role": "target", "address": target, "engine": "0"}
            samples = (
                sample.value
                for metric in text_string_to_metric_families(text.decode())
                for sample in metric.samples
                if sample.name == f"tandem_replica_{name}" and sample.labels == at
            )
            return next(samples, None)

        yield read


QUERIES = "prefix_cache_queries_total"
USAGE = "kv_cache_usage_perc"


async def test_whoever_reads_metrics_sees_what_the_engine_says_now() -> None:
    target = FakeTarget()
    target.usage = KvUsage(1000, 0, 0, 0, 0, prefix_query_tokens=70)
    async with serving(target) as (address, _), scraped(address) as read:
        assert await read(USAGE) == 0
        assert await read(QUERIES) == 0, "it was counted before the coordinator came"
        target.usage = KvUsage(1000, 250, 0, 0, 0, prefix_query_tokens=100)
        assert await read(USAGE) == 0.25
        assert await read(QUERIES) == 30


async def test_counts_of_an_engine_go_on_when_its_service_starts_again() -> None:
    before = FakeTarget()
    after = FakeTarget()
    first = Served(before)
    await first.start()
    second = Served(after, host=first.host, port=first.port)
    async with scraped(first.address) as read:
        before.usage = KvUsage(1000, 500, 0, 0, 0, prefix_query_tokens=40)
        assert await read(QUERIES) == 40
        await first.stop()
        assert await read(QUERIES) == 40
        await await_value(read, USAGE, None)
        await second.start()
        await await_value(read, USAGE, 0.0)
        assert await read(QUERIES) == 40
        after.usage = KvUsage(1000, 0, 0, 0, 0, prefix_query_tokens=2)
        assert await read(QUERIES) == 42
    await second.stop()


async def await_value(read: Callable[[str], Awaitable[float | None]], name: str, value: float | None) -> None:
    """Wait until the metric has this value."""
    async with asyncio.timeout(20.0):
        found = await read(name)
        while found != value:
            await asyncio.sleep(0.05)
            found = await read(name)


async def test_a_service_that_does_not_say_what_its_engine_counts_has_no_such_metrics() -> None:
    class Older(FakeTarget):
        async def GetModelInfo(  # noqa: N802
            self, request: TargetServiceGetModelInfoRequest, context: Context
        ) -> TargetServiceGetModelInfoResponse:
            answer = await super().GetModelInfo(request, context)
            answer.ClearField("statistics")
            return answer

    async with serving(Older()) as (address, _), scraped(address) as read:
        assert [await read(name) for name in (USAGE, QUERIES)] == [None, None]


async def test_a_service_that_hangs_keeps_nobody_from_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    target = FakeTarget()
    async with serving(target) as (address, _), scraped(address) as read:
        target.usage = KvUsage(1000, 250, 0, 0, 0)
        assert await read(USAGE) == 0.25
        waiting = asyncio.Event()

        async def hang(*_: object) -> None:
            await waiting.wait()

        monkeypatch.setattr(TargetClient, "model_info", hang)
        async with asyncio.timeout(5.0):
            assert await read(USAGE) == 0.25
