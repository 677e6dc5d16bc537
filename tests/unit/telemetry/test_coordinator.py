"""The coordinator's metrics stay bounded, and its last minute is a minute."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from coordinator.figures import add, record_round, since
from coordinator.replica import ReplicaSnapshot, ReplicaState, Role
from coordinator.telemetry.metrics import CoordinatorMetrics
from coordinator.telemetry.spans import RequestSpans
from coordinator.telemetry.state import RecentFigures, State, StateCollector
from tandem.types import SpeculationFigures


def figures_of(*rounds: tuple[int, int]) -> SpeculationFigures:
    figures = SpeculationFigures()
    for drafted, accepted in rounds:
        record_round(figures, drafted, accepted)
    return figures


def series(registry: CollectorRegistry) -> int:
    return sum(len(family.samples) for family in registry.collect())


def test_series_are_bounded_whatever_requests_ask_for() -> None:
    registry = CollectorRegistry()
    model = CoordinatorMetrics(registry).of("m")
    model.prepare(2)
    for index in range(100):
        model.speculated(f"rule {index}", figures_of((64, 64)))
    count = series(registry)
    for index in range(100, 200):
        model.speculated(f"rule {index}", figures_of((200, 3)))
    assert series(registry) == count < 600
    name = "tandem_spec_decode_num_accepted_tokens_per_pos_total"
    beyond = registry.get_sample_value(name, {"model_name": "m", "position": "32+"})
    assert beyond == 100 * (64 - 32)


async def test_a_big_fleet_is_counted_whole_and_told_in_part() -> None:
    def replica(index: int) -> ReplicaSnapshot:
        return ReplicaSnapshot(
            role=Role.DRAFT,
            address=f"10.0.0.{index}:1",
            state=ReplicaState.READY,
            reason="",
            since_seconds=1.0,
            open_sequences=0,
            round_trip_seconds=None,
            step_seconds=None,
            figures=figures_of((2, 1)),
            model=None,
        )

    replicas = [replica(index) for index in range(500)]
    registry = CollectorRegistry()
    registry.register(StateCollector(lambda: State("m", 3, 4, replicas, SpeculationFigures())))
    labels = {"model_name": "m", "role": "draft"}
    assert registry.get_sample_value("tandem_replicas", labels | {"state": "ready"}) == 500
    told = [family for family in registry.collect() if family.name == "tandem_replica_ready"]
    assert len(told[0].samples) == 128
    assert registry.get_sample_value("tandem_num_requests_waiting", {"model_name": "m"}) == 4
    at = labels | {"address": "10.0.0.7:1"}
    assert registry.get_sample_value("tandem_replica_accepted_tokens_total", at) == 1


async def test_nothing_proposed_is_no_rate_rather_than_zero() -> None:
    registry = CollectorRegistry()
    registry.register(StateCollector(lambda: State("m", 0, 0, [], figures_of((0, 0)))))
    assert registry.get_sample_value("tandem_spec_decode_acceptance_rate", {"model_name": "m"}) is None


def test_the_last_minute_forgets() -> None:
    now = 100.0
    recent = RecentFigures(lambda: now)
    recent.add(figures_of((2, 2)))
    now = 130.0
    recent.add(figures_of((2, 0)))
    assert (recent.total().drafted, recent.total().accepted) == (4, 2)
    now = 161.0
    assert (recent.total().drafted, recent.total().accepted) == (2, 0)
    now = 500.0
    assert recent.total() == SpeculationFigures()


def test_what_came_since_and_what_was_before_make_the_whole() -> None:
    before, whole = figures_of((2, 1), (2, 2)), figures_of((2, 1), (2, 2), (4, 3), (0, 0))
    fresh = since(whole, before)
    assert fresh == figures_of((4, 3), (0, 0))
    add(before, fresh)
    assert before == whole


@pytest.fixture
def memory() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def spans_of(memory: InMemorySpanExporter) -> RequestSpans:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    return RequestSpans(provider.get_tracer("test"), "id", "", 0.0)


def test_a_flapping_draft_does_not_push_out_the_first_events(memory: InMemorySpanExporter) -> None:
    spans = spans_of(memory)
    for index in range(500):
        spans.event("draft_late", {"index": index})
    spans.finished(None, {}, None)
    (span,) = memory.get_finished_spans()
    assert [(event.attributes or {})["index"] for event in span.events] == list(range(64))
    assert (span.attributes or {})["tandem.events_dropped"] == 500 - 64


def test_internals_do_not_reach_a_span(memory: InMemorySpanExporter) -> None:
    spans = spans_of(memory)
    spans.finished(None, {}, ValueError("/home/someone/secret"))
    (span,) = memory.get_finished_spans()
    assert "secret" not in span.to_json()
    assert (span.attributes or {})["error.type"] == "internal"
