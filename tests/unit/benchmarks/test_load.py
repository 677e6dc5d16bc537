"""Scripted services: what they say, and a coordinator that completes over them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from benchmarks.load.arrivals import arrivals
from benchmarks.load.clients.over_grpc import grpc_connection
from benchmarks.load.figures import Goodput, figures
from benchmarks.load.options import parse
from benchmarks.load.script import Script
from benchmarks.load.sending import send
from coordinator.cli.serve import sends_load
from tests.end_to_end.processes import TANDEM
from tests.paths import ROOT

SCRIPT = Script(2048, 0.72)
POSITIONS = range(2000)


def test_the_draft_is_right_as_often_as_it_should_be() -> None:
    right = sum(SCRIPT.draft_token(position) == SCRIPT.target_token(position) for position in POSITIONS)
    assert 0.68 < right / len(POSITIONS) < 0.76


def test_supports_hold_the_guess_and_the_target_only_where_it_is_the_guess() -> None:
    for position in POSITIONS:
        guess, target = SCRIPT.draft_token(position), SCRIPT.target_token(position)
        support = SCRIPT.support(position, 24)
        assert support[0] == guess
        assert len(set(support)) == 24
        assert all(0 <= token_id < 2048 for token_id in support)
        assert (target in support) == (guess == target)


def test_a_coordinator_completes_over_scripted_services() -> None:
    command = [sys.executable, "-P", "-m", "benchmarks.load", "--clients", "2", "--rules", "greedy,residual"]
    done = subprocess.run(
        [*command, "--tokens", "24", "--rounds", "1", "--verify-ms", "1"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    rows = [line for line in done.stdout.splitlines() if "greedy" in line or "residual" in line]
    assert len(rows) == 2
    for row in rows:
        assert float(row.split("│")[3]) > 2.0, "proposals are accepted"


def test_bench_sends_a_load_over_scripted_services(tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    command = [TANDEM, "bench", "--clients", "4", "--rate", "100", "--requests", "12", "--verify-ms", "1"]
    done = subprocess.run(
        [*command, "--output-tokens", "20", "--goodput", "ttft:60000", "e2el:60000", "--json", str(file)],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "TTFT (ms)" in done.stdout
    report = json.loads(file.read_text(encoding="utf-8"))
    found = report["figures"]
    assert (found["completed"], found["failed"], found["output_tokens"]) == (12, 0, 12 * 20)
    assert found["goodput"] == found["requests_per_second"]
    assert set(found["latencies"]) == {"ttft", "tpot", "itl", "e2el"}
    assert found["latencies"]["itl"]["percentiles"].keys() == {"p50", "p90", "p99"}
    assert report["used"].keys() == {"coordinator", "target", "draft", "clients"}
    assert report["used"]["coordinator"]["mebibytes"][0] > 0
    assert set(report["round_waits"]) == {"between"}


def test_bench_sends_a_load_over_http_to_a_coordinator_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    command = [TANDEM, "bench", "--clients", "3", "--over", "http", "--requests", "6", "--verify-ms", "1"]
    subprocess.run(
        [*command, "--output-tokens", "20", "--measure-waits", "--json", str(file)],
        cwd=ROOT,
        capture_output=True,
        timeout=120,
        check=True,
    )
    report = json.loads(file.read_text(encoding="utf-8"))
    found = report["figures"]
    assert (found["completed"], found["failed"], found["output_tokens"]) == (6, 0, 6 * 20)
    assert report["options"]["over"] == "http"
    assert set(report["round_waits"]) == {"between", "event_loop", "answer", "question"}
    assert all(waits["p99"] >= waits["p50"] > 0 for waits in report["round_waits"].values())
    assert report["used"].keys() == {"coordinator", "target", "draft", "clients"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--clients", "0"], "must be a whole number of at least 1"),
        (["--rate", "-1"], "must be a number above 0"),
        (["--clients", "2", "--goodput", "first:3"], "must be NAME:MILLISECONDS"),
        (["--clients", "2", "--percentiles", "101"], "must be numbers from 0 to 100"),
        (["--http", "127.0.0.1:8000"], "must be http://HOST:PORT or https://HOST:PORT"),
        (["--http", "http://:8000"], "must be http://HOST:PORT or https://HOST:PORT"),
        (["--http", "http://host:port"], "must be http://HOST:PORT or https://HOST:PORT"),
        (["--http", "http://h:1", "--address", "h:2"], "--address and --http name two servers"),
        (["--address", "h:2", "--over", "http"], "--over http is about a coordinator that is started"),
        (["--http", "http://h:1", "--token-file", "/no/such"], "must be a file that can be read"),
    ],
)
def test_wrong_options_of_a_load_are_refused(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        parse(words, "tandem bench")
    assert refused.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "is_load"),
    [
        (["--clients", "4"], True),
        (["--rate=5"], True),
        (["--http", "http://h:1"], True),
        (["--batch", "4"], False),
        ([], False),
    ],
)
def test_clients_a_rate_or_a_url_ask_for_a_load(words: list[str], is_load: bool) -> None:
    assert sends_load(words) is is_load


async def test_a_load_on_a_coordinator_that_runs_counts_its_failures() -> None:
    wanted = arrivals(3, 100.0, 0)
    found = await send(partial(grpc_connection, "127.0.0.1:1"), wanted, 2, 0.0, is_paced=True)
    assert [served.error for served in found] == ["ServiceUnavailableError"] * 3
    assert figures(found, Goodput({}), [50]).failed == 3
