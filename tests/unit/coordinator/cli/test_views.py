"""Output for people is aligned and fits the width of a terminal."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta

import pytest
from rich.console import RenderableType

from tandem.errors import ConfigurationError
from tandem.model.admin import Diagnosis, Severity
from tandem_coordinator.admin.plain import plain
from tandem_coordinator.cli.admin import pairs
from tandem_coordinator.cli.command import as_text
from tandem_coordinator.cli.doctor import clock, distance, doctor_view, version
from tandem_coordinator.cli.views import (
    duration,
    replica_view,
    replicas_view,
    request_view,
    requests_view,
    stats_view,
    status_view,
)
from tests.snapshots import assert_matches
from tests.unit.coordinator.cli.samples import BEFORE, FINDINGS, NOW, REPLICAS, REQUEST, STATS, STATUS

VIEWS: dict[str, RenderableType] = {
    "status": status_view(STATUS, "coordinator.example.org:50051"),
    "stats": stats_view(STATS),
    "stats-second-look": stats_view(STATS, BEFORE),
    "requests": requests_view([REQUEST, replace(REQUEST, request_id="77ab" * 8, rule="greedy")]),
    "request": request_view(REQUEST),
    "doctor": doctor_view(FINDINGS),
}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_fits_its_terminal(name: str, width: int) -> None:
    text = as_text(VIEWS[name], width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text, "something is cut off"
    if width == 80:
        assert_matches(f"views/{name}.txt", text)


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


def test_a_target_that_drafts_by_itself_names_its_method() -> None:
    first = REPLICAS[0]
    assert first.model is not None
    headed = replace(first, model=replace(first.model, drafting_method="eagle3"))
    (row,) = as_text(replicas_view([headed]), width=120).splitlines()[1:]
    assert row.startswith("target, eagle3")
    assert ["own", "head", "eagle3"] in [
        line.split() for line in as_text(replica_view(headed), width=120).splitlines()
    ]


@pytest.mark.parametrize("apart", [0.0, 0.9, -0.9, 3.0, -3.0])
def test_clocks_are_compared_halfway_through_the_call(apart: float) -> None:
    took = 0.2
    told = NOW + timedelta(seconds=took / 2 + apart)
    assert clock(NOW, took, told).severity is (Severity.OK if abs(apart) < 1.0 else Severity.WARNING)


def test_other_findings_of_the_client() -> None:
    assert distance(0.001).severity is Severity.OK
    assert distance(0.5).severity is Severity.WARNING
    assert version(Diagnosis("9.9.9", NOW, ())).severity is Severity.WARNING


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0s"), (59.9, "59s"), (60, "1m 0s"), (725, "12m 5s"), (3600, "1h 0m"), (90061, "1d 1h"), (400000, "4d 15h")],
)  # fmt: skip
def test_a_duration_has_two_units(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_names_and_values_are_joined_in_pairs() -> None:
    assert pairs(["a", "1", "b=2", "c", "x=y"]) == {"a": "1", "b": "2", "c": "x=y"}
    assert pairs(["a="]) == {"a": ""}
    with pytest.raises(ConfigurationError, match="a has no value"):
        pairs(["b", "1", "a"])
