"""Several workers: their share of the bounds, and answers that are merged."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.admin.administration import found_request
from coordinator.admin.servicer import AdminServicer
from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.workers.supervisor import Hub, merged_metrics, merged_replicas, merged_state, merged_stats
from coordinator.workers.worker import WorkerSetup, private_server, share, socket_address
from tandem.admin import CoordinatorState, Load, Outcomes, RequestReport, Stats, Throughput
from tandem.errors import InvalidRequestError, NotFoundError, ServiceUnavailableError
from tandem.replica import ReplicaSnapshot, ReplicaState, Role
from tandem.speculation_state import SpeculationDecision, SpeculationState
from tandem.telemetry.metrics import registry_of
from tandem.types import PositionStats, SpeculationStats


@given(bound=st.integers(0, 5000), count=st.integers(1, 64))
def test_shares_add_up_to_the_bound_and_differ_by_one_at_most(bound: int, count: int) -> None:
    shares = [share(bound, index, count) for index in range(count)]
    assert sum(shares) == bound
    assert max(shares) - min(shares) <= 1


def test_a_worker_has_its_share_and_the_shared_port() -> None:
    settings = CoordinatorSettings(
        target_address="127.0.0.1:1",
        workers=3,
        max_concurrent_requests=10,
        max_queued_requests=2,
        max_streams_per_peer=4,
        prometheus_port=9000,
        metric_names="vllm",
        http_max_body_bytes=1 << 20,
        http_max_held_body_bytes=2 << 20,
        stream_interval=4,
    )
    found = [WorkerSetup(index, 50051, "/f").settings(settings) for index in range(3)]
    assert [each.max_concurrent_requests for each in found] == [4, 3, 3]
    assert [each.max_queued_requests for each in found] == [1, 1, 0]
    assert {each.max_streams_per_peer for each in found} == {2}
    assert {each.port for each in found} == {50051}
    assert {(each.prometheus_port, each.metric_names) for each in found} == {(None, "tandem")}
    assert {each.http_max_held_body_bytes for each in found} == {1 << 20}
    assert {each.stream_interval for each in found} == {4}
    # They are settings that could have been given, so that live changes can be checked against them.
    for each in found:
        CoordinatorSettings(**each.model_dump())


def test_more_workers_than_places_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_concurrent_requests is 2; it must be at least workers \(3\)"):
        CoordinatorSettings(target_address="127.0.0.1:1", workers=3, max_concurrent_requests=2)


NOW = datetime(2026, 1, 2, tzinfo=UTC)
OFF, ON = SpeculationState(False, 0, "no draft"), SpeculationState(True, 4)
FIGURES = SpeculationStats(3, 6, 4, [PositionStats(3, 3, 2), PositionStats(3, 2, 2)])
TARGET = ReplicaSnapshot(Role.TARGET, "t:1", ReplicaState.READY, "", 9.0, 2, 0.002, None, FIGURES, None)
DRAFT = replace(TARGET, role=Role.DRAFT, address="d:1")


def decision(seconds: float, k: int) -> SpeculationDecision:
    return SpeculationDecision("t:1", "m", "strict", "0.85-1.15", 4, k, k, 1.2, seconds, seconds)


STATS = Stats(
    NOW, 5.0, Load(2, 1), Throughput(10.0, 20.0), Outcomes(4, 3, 2, 1), 100, FIGURES, {"strict": FIGURES}, OFF,
    (decision(1.0, 2),),
)  # fmt: skip


def test_counts_loads_and_rates_are_added() -> None:
    other = replace(STATS, by_rule={"greedy": FIGURES}, speculation_state=ON, decisions=(decision(3.0, 5),))
    both = merged_stats([STATS, other])
    assert (both.load, both.throughput) == (Load(4, 2), Throughput(20.0, 40.0))
    assert both.outcomes == Outcomes(8, 6, 4, 2)
    assert both.completion_tokens == 200
    assert (both.speculation.rounds, both.speculation.positions[1].accepted) == (6, 4)
    assert {rule: stats.rounds for rule, stats in both.by_rule.items()} == {"greedy": 3, "strict": 3}
    assert both.speculation_state is ON
    assert [each.num_speculative_tokens for each in both.decisions] == [5], "that with more measurements"


def test_counts_of_an_ended_worker_stay_and_its_load_goes() -> None:
    both = merged_stats([STATS], [STATS])
    assert (both.completion_tokens, both.outcomes.completed) == (200, 8)
    assert both.load == STATS.load
    assert both.speculation.rounds == 6


def test_a_replica_is_as_its_worst_worker_sees_it() -> None:
    lost = replace(
        TARGET, state=ReplicaState.DOWN, reason="refused", open_sequences=1, round_trip_seconds=0.004
    )
    target, draft = merged_replicas([[TARGET, DRAFT], [lost, DRAFT]])
    assert (target.state, target.reason, target.open_sequences) == (ReplicaState.DOWN, "refused", 3)
    assert target.round_trip_seconds == pytest.approx(0.003)
    assert target.step_seconds is None
    assert (draft.state, draft.open_sequences, draft.figures.rounds) == (ReplicaState.READY, 4, 6)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ((CoordinatorState.READY, CoordinatorState.READY), CoordinatorState.READY),
        ((CoordinatorState.READY, CoordinatorState.UNAVAILABLE), CoordinatorState.DEGRADED),
        ((CoordinatorState.UNAVAILABLE, CoordinatorState.STARTING), CoordinatorState.UNAVAILABLE),
    ],
)
def test_the_state_is_degraded_where_only_some_complete_requests(
    states: tuple[CoordinatorState, ...], expected: CoordinatorState
) -> None:
    assert merged_state(set(states)) is expected


class Worker:
    """Notes its changes. It may see but one target."""

    def __init__(self, *, has_one_target: bool) -> None:
        self.has_one_target = has_one_target
        self.changes: list[str] = []

    async def replicas(self) -> list[ReplicaSnapshot]:
        return [TARGET]

    async def drain(self, address: str, *, allow_last_target: bool, by: str) -> ReplicaSnapshot:
        if self.has_one_target and not allow_last_target:
            raise InvalidRequestError("it is the last target")
        self.changes.append(f"drain {address}")
        return TARGET

    async def update_config(self, values: Any, reset_names: Any, *, by: str) -> list[Any]:
        if values.get("num_speculative_tokens") == "4":
            raise InvalidRequestError("it is refused")
        self.changes.append(f"set {dict(values)}, reset {[*reset_names]}")
        return []


async def test_a_change_is_made_by_all_workers_or_said_to_have_failed(tmp_path: Path) -> None:
    hub, folder = Hub(CoordinatorSettings(target_address="127.0.0.1:1", workers=2)), str(tmp_path)
    workers: list[Any] = [Worker(has_one_target=False), Worker(has_one_target=True)]
    servers = [
        await private_server(socket_address(folder, index), AdminServicer(worker), hub.metrics_text)
        for index, worker in enumerate(workers)
    ]
    await hub.joined(WorkerSetup(0, 1, folder))
    late = WorkerSetup(1, 1, folder, changes={"draft_ahead": "true"})
    await hub.update_config({"num_speculative_tokens": "3"}, (), by="")
    await hub.drain("t:1", allow_last_target=True, by="")
    await hub.joined(late)
    made = ["drain t:1", "set {'num_speculative_tokens': '3'}, reset ['draft_ahead']"]
    assert sorted(workers[1].changes) == made, "what changed while it started"
    sentence = "^1 of 2 workers did not make the change, which the others made: it is the last target$"
    with pytest.raises(InvalidRequestError, match=sentence):
        await hub.drain("t:1", allow_last_target=False, by="")
    with pytest.raises(InvalidRequestError, match="it is refused"):
        await hub.update_config({"num_speculative_tokens": "4"}, (), by="")
    assert hub.live_config.changes == {"num_speculative_tokens": "3"}, "no worker made the change"
    await servers[1].stop(0)
    (tmp_path / "1").unlink(missing_ok=True)
    with pytest.raises(ServiceUnavailableError, match=r"^1 of 2 .* made: worker 1: ") as silent:
        await hub.update_config({"num_speculative_tokens": "5"}, (), by="")
    assert folder not in str(silent.value)
    assert hub.live_config.changes == {"num_speculative_tokens": "5"}, "a worker made the change"
    for index, server in enumerate(servers):
        await hub.left(index)
        await server.stop(0)


def test_a_request_is_found_by_the_beginning_of_its_id() -> None:
    reports = [
        RequestReport(name, 1.0, 1, 1, "greedy", 4, None, None, FIGURES, ON) for name in ("ab1", "ab", "c")
    ]
    assert found_request(reports, "ab1").request_id == "ab1"
    assert found_request(reports, "ab").request_id == "ab", "a whole id is no beginning"
    assert found_request(reports, "c").request_id == "c"
    with pytest.raises(InvalidRequestError, match="2 requests"):
        found_request(reports, "a")
    with pytest.raises(NotFoundError):
        found_request(reports, "x")


def process(tokens: int, running: int, rate: float, seconds: list[float]) -> str:
    """The metrics of a process as it writes them."""
    registry = CollectorRegistry()
    Counter("tandem_generation_tokens", "Tokens.", ("model_name",), registry=registry).labels("m").inc(tokens)
    Gauge("tandem_num_requests_running", "Running.", ("model_name",), registry=registry).labels("m").set(
        running
    )
    Gauge("tandem_spec_decode_acceptance_rate", "Rate.", registry=registry).set(rate)
    replicas = Gauge("tandem_replicas", "Replicas.", ("role",), registry=registry)
    replicas.labels("target").set(2)
    Gauge("tandem_replica_ready", "Ready.", ("address",), registry=registry).labels("a:1").set(running > 1)
    histogram = Histogram("tandem_prefill_seconds", "Prefill.", buckets=(0.1, 1.0), registry=registry)
    for each in seconds:
        histogram.observe(each)
    return generate_latest(registry).decode()


ONE, OTHER = process(10, 1, 0.5, [0.05, 0.5]), process(32, 2, 0.7, [0.5, 5.0])


def parsed(text: str) -> list[Metric]:
    return list(text_string_to_metric_families(text))


def value(metrics: list[Metric], name: str, **labels: str) -> float:
    (found,) = [
        sample.value
        for metric in metrics
        for sample in metric.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return float(found)


def test_counters_histograms_and_loads_are_added() -> None:
    both = merged_metrics([parsed(ONE), parsed(OTHER)])
    assert value(both, "tandem_generation_tokens_total", model_name="m") == 42
    assert value(both, "tandem_num_requests_running") == 3
    assert value(both, "tandem_prefill_seconds_count") == 4
    assert value(both, "tandem_prefill_seconds_sum") == 6.05
    assert [value(both, "tandem_prefill_seconds_bucket", le=le) for le in ("0.1", "1.0", "+Inf")] == [1, 3, 4]


def test_what_all_say_of_the_same_thing_is_not_added() -> None:
    both = merged_metrics([parsed(ONE), parsed(OTHER)])
    assert value(both, "tandem_replicas", role="target") == 2
    assert value(both, "tandem_replica_ready", address="a:1") == 0, "one of them cannot reach it"
    assert abs(value(both, "tandem_spec_decode_acceptance_rate") - 0.6) < 1e-9


def test_merged_metrics_are_written_as_those_of_a_single_process() -> None:
    both = generate_latest(registry_of(lambda: merged_metrics([parsed(ONE)])))
    assert both == generate_latest(registry_of(lambda: parsed(ONE)))
    assert value(parsed(both.decode()), "tandem_generation_tokens_total") == 10
