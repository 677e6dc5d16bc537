"""The coordinator's metrics are bounded, and decisions, replicas and hits are read when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import INVALID_SPAN
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer

from tandem.model.replica import ReplicaSnapshot, ReplicaState, Role
from tandem.model.speculation_state import SpeculationDecision
from tandem.model.types import AheadStats, EngineStatistics, ModelInfo, SpeculationStats, TokenHistogram
from tandem.telemetry.metrics import Read, name_metrics, on_loop
from tandem.telemetry.process import unit_of
from tandem.telemetry.settings import TelemetryOptions
from tandem_coordinator.decoding.completion import Completion, Detokenizer, Limits, StopStrings
from tandem_coordinator.settings.coordinator import CoordinatorSettings
from tandem_coordinator.telemetry.metrics import RequestMetrics, state_metrics
from tandem_coordinator.telemetry.observed import ObservedRequest, ObservedRequests
from tandem_coordinator.telemetry.observer import CHAT, Choices, ReplicaEngine, State
from tests.paths import DEMO_TARGET
from tests.service.test_telemetry import MemoryExports
from tests.unit.coordinator.ended_rounds import round_ended
from tests.unit.coordinator.stats.test_speculation import counted


def series(registry: CollectorRegistry) -> int:
    return sum(len(family.samples) for family in registry.collect())


def state(
    by_rule: Mapping[str, SpeculationStats] | None = None,
    replicas: Sequence[ReplicaSnapshot] = (),
    decisions: Sequence[SpeculationDecision] = (),
) -> State:
    return State("m", 2, 3, 4, 9, by_rule or {}, SpeculationStats(), replicas, decisions)


def registry_of(read: Callable[[], State]) -> CollectorRegistry:
    registry = CollectorRegistry()
    state = on_loop(read)
    registry.register(Read(lambda: () if (found := state()) is None else state_metrics(found, {})))
    return registry


async def test_positions_and_rules_have_series_from_the_start_and_their_number_is_bounded() -> None:
    stats = SpeculationStats()
    registry = registry_of(lambda: state({"greedy": stats}))
    name = "tandem_spec_decode_num_accepted_tokens_per_pos_total"
    at_start = series(registry)
    assert registry.get_sample_value(name, {"model_name": "m", "position": "2"}) == 0
    rounds = "tandem_spec_decode_num_rounds_total"
    assert registry.get_sample_value(rounds, {"model_name": "m", "rule": "residual"}) == 0
    stats = counted((100, 64, 64))
    count = series(registry)
    assert at_start < count < 300
    stats = counted((100, 64, 64), (1, 200, 3))
    assert series(registry) == count
    beyond = registry.get_sample_value(name, {"model_name": "m", "position": "33+"})
    assert beyond == 100 * (64 - 32)


async def test_every_counter_has_a_unit() -> None:
    registry = registry_of(lambda: state({"greedy": SpeculationStats()}))
    RequestMetrics(registry, model_name="m")
    counters = [family.name for family in registry.collect() if family.type == "counter"]
    assert len(counters) > 15
    assert [name for name in counters if not unit_of(name)] == []
    assert unit_of("tandem_num_requests_waiting") == "{request}"
    assert unit_of("tandem_build_info") == ""


async def test_hits_are_counted_by_rank() -> None:
    ahead = AheadStats(awaited=60, hits=48, hits_by_rank=[*range(0, 10, 2), *[2] * 11], saved_seconds=1.0)
    registry = registry_of(lambda: state({"greedy": SpeculationStats(30, ahead=ahead)}))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"tandem_draft_ahead_{name}_total", {"model_name": "m", **labels})

    assert value("awaited_rounds") == 60
    assert value("saved_seconds") == 1.0
    assert [value("hits", rank=str(rank)) for rank in (1, 5, 16)] == [0, 8, 2]
    assert value("hits", rank="17+") == 6
    assert series(registry) == series(registry_of(state)), "every rank has its series from the start"


async def test_a_large_fleet_is_counted_completely_and_listed_partly() -> None:
    def replica(index: int) -> ReplicaSnapshot:
        return ReplicaSnapshot(
            role=Role.DRAFT, address=f"10.0.0.{index}:1", state=ReplicaState.READY, reason="", since_seconds=1.0,
            open_sequences=0, round_trip_seconds=None, step_seconds=None, figures=counted((1, 2, 1)),
            model=None,
        )  # fmt: skip

    replicas = [replica(index) for index in range(500)]
    registry = registry_of(lambda: state(replicas=replicas))
    labels = {"model_name": "m", "role": "draft"}
    assert registry.get_sample_value("tandem_replicas", labels | {"state": "ready"}) == 500
    listed = [family for family in registry.collect() if family.name == "tandem_replica_ready"]
    assert len(listed[0].samples) == 128
    assert registry.get_sample_value("tandem_num_requests_waiting", {"model_name": "m"}) == 4
    assert registry.get_sample_value("tandem_spec_decode_acceptance_rate", {"model_name": "m"}) is None
    at = labels | {"address": "10.0.0.7:1"}
    assert registry.get_sample_value("tandem_replica_accepted_tokens_total", at) == 1


def engine_at(role: Role, address: str, number: int, shot: ReplicaState) -> State:
    """Return the state of a coordinator with one replica, whose engine holds a quarter of its cache."""
    steps = TokenHistogram((8, 100), (3, 1, 0), 40)
    statistics = EngineStatistics(1024, 256, 64, True, 50, 20, steps)
    replica = ReplicaSnapshot(
        role=role, address=address, state=shot, reason="", since_seconds=1.0,
        open_sequences=0, round_trip_seconds=None, step_seconds=None, figures=SpeculationStats(),
        model=ModelInfo("m", "M", 8, "hash", 128, "none", ()),
    )  # fmt: skip
    engines = {(role, address): ReplicaEngine(number, statistics)}
    return replace(state(replicas=[replica]), engines=engines)


async def test_engines_are_told_by_replica() -> None:
    registry = registry_of(lambda: engine_at(Role.TARGET, "10.0.0.7:1", 3, ReplicaState.READY))
    at = {"model_name": "m", "role": "target", "address": "10.0.0.7:1", "engine": "3"}

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"tandem_replica_{name}", at | labels)

    assert value("kv_cache_usage_perc") == 0.25
    assert value("prefix_cache_queries_total") == 50
    assert value("prefix_cache_hits_total") == 20
    below = [value("engine_batch_tokens_bucket", le=bound) for bound in ("8.0", "100.0", "+Inf")]
    assert below == [3, 4, 4]
    assert value("engine_batch_tokens_sum") == 40
    configured = {
        "block_size": "64",
        "num_gpu_blocks": "16",
        "enable_prefix_caching": "True",
        "kv_cache_size_tokens": "1024",
        "kv_cache_max_concurrency": "8.00",
    }
    assert value("cache_config_info", **configured) == 1


async def test_of_a_replica_that_is_away_only_the_counts_are_told() -> None:
    registry = registry_of(lambda: engine_at(Role.TARGET, "10.0.0.7:1", 0, ReplicaState.DOWN))
    at = {"model_name": "m", "role": "target", "address": "10.0.0.7:1", "engine": "0"}
    assert registry.get_sample_value("tandem_replica_prefix_cache_queries_total", at) == 50
    assert registry.get_sample_value("tandem_replica_kv_cache_usage_perc", at) is None
    assert not any(
        family.samples for family in registry.collect() if family.name == "tandem_replica_cache_config_info"
    )


@pytest.mark.parametrize("role", [Role.TARGET, Role.DRAFT])
async def test_a_target_is_an_engine_under_vllms_names_and_a_draft_is_none(role: Role) -> None:
    registry = registry_of(lambda: engine_at(role, "10.0.0.7:1", 3, ReplicaState.READY))
    named = name_metrics(registry, TelemetryOptions(metric_names="vllm"))
    at = {"model_name": "m", "engine": "3"}
    found = [
        named.get_sample_value(f"vllm:{name}", at)
        for name in ("kv_cache_usage_perc", "prefix_cache_hits_total", "iteration_tokens_total_sum")
    ]
    assert found == ([0.25, 20, 40] if role is Role.TARGET else [None, None, None])
    own = at | {"role": role.value, "address": "10.0.0.7:1"}
    usage = named.get_sample_value("tandem_replica_kv_cache_usage_perc", own)
    assert usage == (None if role is Role.TARGET else 0.25)


async def test_rejections_are_told_by_the_limit_in_vllms_words_too() -> None:
    registry = registry_of(lambda: replace(state(), rejections={"max_queued_requests": 2, "max_batches": 0}))
    at = {"model_name": "m", "reason": "max_queued_requests"}
    assert registry.get_sample_value("tandem_admission_rejections_total", at) == 2
    named = name_metrics(registry, TelemetryOptions(metric_names="vllm"))
    at = {"model_name": "m", "reason": "max_num_queued_reqs"}
    assert named.get_sample_value("vllm:admission_rejections_total", at) == 2


async def test_accepted_tokens_are_told_by_the_length_of_the_proposal() -> None:
    counts = {(0, 0): 9, (4, 4): 2, (4, 1): 3, (12, 5): 1, (64, 40): 1}
    registry = registry_of(lambda: replace(state(), round_counts=counts))
    name = "tandem_spec_decode_accepted_tokens"

    def found(suffix: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"{name}_{suffix}", {"model_name": "m", **labels})

    of_four = {"proposal_length": "4"}
    assert [found("bucket", le=bound, **of_four) for bound in ("0.0", "1.0", "3.0", "4.0")] == [0, 3, 3, 5]
    assert (found("count", **of_four), found("sum", **of_four)) == (5, 11)
    assert found("sum", proposal_length="9-16") == 5
    assert found("bucket", le="16.0", proposal_length="17+") == 0
    assert found("count", proposal_length="17+") == 1
    assert found("count", proposal_length="0") is None, "the target worked alone"


def test_completions_of_one_prompt_count_as_one_request() -> None:
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry, model_name="m")
    requests = ObservedRequests(CoordinatorSettings(target_address="127.0.0.1:1"))
    choices = Choices(CHAT, 3)
    for _ in range(3):
        assert registry.get_sample_value("tandem_request_params_n_count", {"model_name": "m"}) == 0
        ObservedRequest(requests, metrics, INVALID_SPAN, choices).finished(None)
    assert registry.get_sample_value("tandem_request_params_n_sum", {"model_name": "m"}) == 3
    name = "tandem_e2e_request_latency_seconds_count"
    labels = {"model_name": "m", "operation": "chat", "error_type": ""}
    assert registry.get_sample_value(name, labels) == 3


@pytest.fixture
def memory() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def spans_of(memory: InMemorySpanExporter, trace_rounds: float = 0.0) -> ObservedRequest:
    settings = CoordinatorSettings(target_address="127.0.0.1:1", trace_rounds=trace_rounds)
    requests = ObservedRequests(settings, MemoryExports(memory))
    metrics = RequestMetrics(CollectorRegistry(), model_name="m")
    return ObservedRequest(requests, metrics, requests.tracer.start_span("request"), Choices())


async def test_a_client_s_trace_reaches_the_services_of_a_coordinator_that_traces_nothing() -> None:
    requests = ObservedRequests(CoordinatorSettings(target_address="127.0.0.1:1"))
    requests.ready("m", state)
    traceparent = "00-0123456789abcdef0123456789abcdef-00f067aa0ba902b7-01"
    request = requests.begin("r", traceparent)
    assert request.stream("target", "127.0.0.1:50052").traceparent == traceparent
    request.finished(None)


def test_a_flapping_draft_does_not_push_out_the_first_events(memory: InMemorySpanExporter) -> None:
    spans = spans_of(memory)
    for index in range(500):
        spans.event("draft_late", {"index": index})
    spans.finished(None)
    (span,) = memory.get_finished_spans()
    assert [(event.attributes or {})["index"] for event in span.events] == list(range(64))
    assert (span.attributes or {})["tandem.events_dropped"] == 500 - 64


def test_internals_do_not_reach_a_span(memory: InMemorySpanExporter) -> None:
    spans = spans_of(memory)
    spans.finished(ValueError("/home/someone/secret"))
    (span,) = memory.get_finished_spans()
    assert "secret" not in span.to_json()
    assert (span.attributes or {})["error.type"] == "internal"


async def test_decisions_are_exported_for_each_load() -> None:
    decided = SpeculationDecision(
        "10.0.0.1:50052", "draft", "residual", "0.85-1.15", 16, 0, 2, 0.86, 2.0, 2.1
    )
    ahead = replace(decided, num_speculative_tokens=3, ahead_outcomes=8)
    registry = registry_of(lambda: state(decisions=[decided, ahead]))
    found = {
        sample.name: sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.labels.get("sequences") == "16" and sample.labels["ahead"] == "off"
    }
    assert found == {
        "tandem_spec_decode_proposal_length": 0.0,
        "tandem_spec_decode_predicted_gain": 0.86,
        "tandem_round_predicted_seconds_total": 2.0,
        "tandem_round_measured_seconds_total": 2.1,
    }


def test_spans_report_drafting_ahead(memory: InMemorySpanExporter) -> None:
    spans = spans_of(memory, 1.0)
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    completion = Completion((1,), Limits(9, 9), Detokenizer(tokenizer), StopStrings(()), "r", 3)
    spans.planned(completion, {"gen_ai.request.model": "m", "tandem.rule": "greedy"})
    spans.round_ended(round_ended(4, 2))
    spans.round_ended(round_ended(4, 2, awaited=True))
    spans.round_ended(round_ended(4, 2, awaited=True, rank=0, saved=0.01))
    spans.record_statistics(SpeculationStats(ahead=AheadStats(2, 1, [1], 0.01)), None)
    spans.finished(None)
    *rounds, request = (dict(span.attributes or {}) for span in memory.get_finished_spans())
    listed = [
        (each.get("tandem.ahead.hit"), each.get("tandem.ahead.rank"))
        for each in rounds
        if "tandem.round" in each
    ]
    assert listed == [(None, None), (False, None), (True, 1)]
    assert request["tandem.ahead.awaited"] == 2
    assert request["tandem.ahead.hits_by_rank"] == (1,)
    assert request["tandem.ahead.saved_seconds"] == 0.01
    assert request["tandem.rule"] == "greedy"
