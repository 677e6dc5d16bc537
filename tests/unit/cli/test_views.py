"""What a person sees: aligned, calm, and within the width of a terminal."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import RenderableType

from coordinator.cli.admin.doctor import clock, distance, summary, version, view
from coordinator.cli.admin.requests import request_table, request_view
from coordinator.cli.admin.stats import stats_view
from coordinator.cli.admin.status import status_view
from coordinator.cli.output import as_text, plain
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
from tandem.replica import ReplicaSnapshot, ReplicaState, Role
from tandem.types import ModelInfo, PositionFigures, SpeculationFigures
from tests.snapshots import assert_matches

NOW = datetime(2026, 11, 21, 12, 30, 5, 250000, tzinfo=UTC)
FIGURES = SpeculationFigures(
    10234,
    40936,
    24871,
    [
        PositionFigures(10234, 10234, 8402),
        PositionFigures(10234, 8402, 6801),
        PositionFigures(10234, 6801, 5500),
        PositionFigures(10234, 5500, 4168),
    ],
)
MODEL = ModelInfo("Llama-3.1-70B", "LlamaForCausalLM", 128256, "ab" * 32, 8192, "bfloat16", (2,), "0.1.0", 7)


def replica(
    role: Role, address: str, state: ReplicaState = ReplicaState.READY, reason: str = ""
) -> ReplicaSnapshot:
    return ReplicaSnapshot(role, address, state, reason, 4030, 12, 0.0004, 0.0213, FIGURES, MODEL)


REPLICAS = (
    replica(Role.TARGET, "10.244.123.231:50051"),
    replica(Role.TARGET, "10.244.123.232:50051", ReplicaState.DRAINING, "an operator drained it"),
    replica(
        Role.DRAFT,
        "10.244.123.240:50052",
        ReplicaState.INCOMPATIBLE,
        "the draft Llama-3.2-1B has another tokenizer (hash cdcdcdcdcdcd) than the target Llama-3.1-70B (hash "
        "abababababab); a token id must mean the same to both",
    ),
    replace(
        replica(Role.DRAFT, "10.244.123.241:50052", ReplicaState.DOWN, "it does not answer"),
        figures=SpeculationFigures(),
        round_trip_seconds=None,
        step_seconds=None,
    ),
)
STATUS = Status(
    "0.1.0",
    CoordinatorState.DEGRADED,
    NOW,
    8054.0,
    "Llama-3.1-70B",
    Load(24, 3),
    Throughput(1412.34, 1388.01),
    FIGURES,
    SpeculationSettings(True, 4, "residual"),
    REPLICAS,
)
STATS = Stats(
    NOW,
    8054.0,
    Load(24, 3),
    Throughput(1412.34, 1388.01),
    Outcomes(12803, 3, 41, 2),
    1_482_201,
    FIGURES,
    {"typical-acceptance": FIGURES, "greedy": SpeculationFigures(12)},
)
BEFORE = replace(
    STATS, speculation=replace(FIGURES, rounds=10000, drafted=40000, accepted=24400, positions=[])
)
REQUEST = RequestReport(
    "3f9c" * 8, 12.5, 4096, 371, "typical-acceptance", 4, "10.244.123.241:50052", None, FIGURES
)
FINDINGS = (
    Finding("address", "10.0.0.5:50051", Severity.OK, "it accepts connections, within 1.3 ms"),
    Finding(
        "round trip",
        "10.244.123.231:50051",
        Severity.WARNING,
        "8.2 ms, which every round waits for",
        "bring it nearer to the coordinator, or propose more tokens in each round",
    ),
    Finding("targets", "", Severity.PROBLEM, "0 of 2 take new sequences", "start a target service"),
)


VIEWS: dict[str, RenderableType] = {
    "status": status_view(STATUS, "coordinator.example.org:50051"),
    "stats": stats_view(STATS),
    "stats-second-look": stats_view(STATS, BEFORE),
    "requests": request_table([REQUEST, replace(REQUEST, request_id="77ab" * 8, rule="greedy")]),
    "request": request_view(REQUEST),
    "doctor": view(FINDINGS),
}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_fits_its_terminal(name: str, width: int) -> None:
    text = as_text(VIEWS[name], width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text, "something is cut off"
    assert_matches(f"views/{name}-{width}.txt", text)


def test_a_replica_has_one_row() -> None:
    lines = as_text(VIEWS["status"], width=80).splitlines()
    for shown in REPLICAS:
        assert sum(line.startswith(f"{shown.role.value:8}{shown.address}") for line in lines) == 1


def test_what_programs_read_is_of_types_that_json_has() -> None:
    told = plain(STATUS)
    assert told["state"] == "degraded"
    assert told["time"] == "2026-11-21T12:30:05.250+00:00"
    assert told["replicas"][0]["role"] == "target"
    assert told["replicas"][3]["step_seconds"] is None
    assert told["speculation"]["acceptance_rate"] == round(24871 / 40936, 6)
    assert plain(FINDINGS)[2]["severity"] == "problem"


@pytest.mark.parametrize(
    ("apart", "severity"),
    [
        (0.0, Severity.OK),
        (0.9, Severity.OK),
        (-0.9, Severity.OK),
        (3.0, Severity.WARNING),
        (-3.0, Severity.WARNING),
    ],
)
def test_clocks_are_compared_halfway_through_the_call(apart: float, severity: Severity) -> None:
    took = 0.2
    told = NOW + timedelta(seconds=took / 2 + apart)
    assert clock(NOW, took, told).severity is severity


def test_a_slow_answer_is_no_proof_of_a_wrong_clock() -> None:
    assert clock(NOW, 10.0, NOW + timedelta(seconds=9.9)).severity is Severity.OK


def test_other_findings_from_here() -> None:
    assert distance(0.001).severity is Severity.OK
    assert distance(0.5).severity is Severity.WARNING
    assert version(Diagnosis("9.9.9", NOW, ())).severity is Severity.WARNING
    assert summary(FINDINGS) == "3 checks: 1 fine, 1 warning, 1 problem"
