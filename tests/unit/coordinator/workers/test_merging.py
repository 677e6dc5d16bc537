"""What several workers say becomes what one coordinator says."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from coordinator.workers.hub import found_request
from coordinator.workers.merging import merged_diagnosis, merged_replicas, merged_stats, merged_status
from tandem.admin import (
    CoordinatorState,
    Diagnosis,
    Finding,
    Load,
    Outcomes,
    RequestReport,
    Severity,
    SpeculationSettings,
    Stats,
    Status,
    Throughput,
)
from tandem.errors import InvalidRequestError, NotFoundError
from tandem.replica import ReplicaSnapshot, ReplicaState, Role
from tandem.speculation_state import SpeculationDecision, SpeculationState
from tandem.types import PositionStats, SpeculationStats

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
STATUS = Status(
    "1", CoordinatorState.READY, NOW, 5.0, "m", Load(2, 1), Throughput(10.0, 20.0), FIGURES,
    SpeculationSettings(True, 4, "strict"), (TARGET, DRAFT), OFF,
)  # fmt: skip


def test_counts_loads_and_rates_are_added() -> None:
    other = replace(STATS, by_rule={"greedy": FIGURES}, speculation_state=ON, decisions=(decision(3.0, 5),))
    both = merged_stats([STATS, other], None, 7.0)
    assert (both.load, both.throughput) == (Load(4, 2), Throughput(20.0, 40.0))
    assert both.outcomes == Outcomes(8, 6, 4, 2)
    assert both.completion_tokens == 200
    assert both.uptime_seconds == 7.0
    assert (both.speculation.rounds, both.speculation.positions[1].accepted) == (6, 4)
    assert {rule: stats.rounds for rule, stats in both.by_rule.items()} == {"greedy": 3, "strict": 3}
    assert both.speculation_state is ON
    assert [each.num_speculative_tokens for each in both.decisions] == [5], "that with more measurements"


def test_counts_of_an_ended_worker_stay_and_its_load_goes() -> None:
    both = merged_stats([STATS], STATS, 7.0)
    assert (both.completion_tokens, both.outcomes.completed) == (200, 8)
    assert both.load == STATS.load
    assert merged_status([STATUS], STATS, 7.0).speculation.rounds == 6


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
    status = merged_status([replace(STATUS, state=state) for state in states], None, 7.0)
    assert status.state is expected
    assert (status.load, status.uptime_seconds) == (Load(4, 2), 7.0)


def test_the_worst_finding_of_each_check_counts() -> None:
    fine = Finding("target", "t:1", Severity.OK, "ready")
    lost = Finding("target", "t:1", Severity.PROBLEM, "lost", "start it")
    other = Finding("drafts", "", Severity.OK, "1 of 1")
    both = merged_diagnosis([Diagnosis("1", NOW, (fine, other)), Diagnosis("1", NOW, (lost, other))])
    assert both.findings == (lost, other)


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
