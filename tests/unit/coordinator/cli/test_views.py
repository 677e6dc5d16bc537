"""Output for people is aligned and fits the width of a terminal."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta

import pytest
from rich.console import RenderableType

from coordinator.cli.admin.doctor import clock, distance, summary, version, view
from coordinator.cli.admin.requests import request_table, request_view
from coordinator.cli.admin.stats import stats_view
from coordinator.cli.admin.status import status_view
from coordinator.cli.command import as_text, plain
from tandem.admin import Diagnosis, Severity
from tests.snapshots import assert_matches
from tests.unit.coordinator.cli.samples import BEFORE, FINDINGS, NOW, REPLICAS, REQUEST, STATS, STATUS

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


def test_output_for_programs_consists_of_json_types() -> None:
    told = plain(STATUS)
    assert told["state"] == "degraded"
    assert told["time"] == "2026-11-21T12:30:05.250+00:00"
    assert told["replicas"][0]["role"] == "target"
    assert told["replicas"][3]["step_seconds"] is None
    assert told["speculation"]["acceptance_rate"] == round(24871 / 40936, 6)
    assert plain(frozenset({Severity.PROBLEM, Severity.OK})) == ["ok", "problem"], "sets have one order"
    json.dumps(plain(REPLICAS))
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


def test_a_slow_answer_gives_no_verdict_on_the_clock() -> None:
    assert clock(NOW, 10.0, NOW + timedelta(seconds=9.9)).severity is Severity.OK


def test_other_findings_of_the_client() -> None:
    assert distance(0.001).severity is Severity.OK
    assert distance(0.5).severity is Severity.WARNING
    assert version(Diagnosis("9.9.9", NOW, ())).severity is Severity.WARNING
    assert summary(FINDINGS) == "3 checks: 1 fine, 1 warning, 1 problem"
