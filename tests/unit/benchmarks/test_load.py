"""A load: arrivals, lengths, figures, the command line, and the processes of a cluster without models."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.load.fakes import Script
from benchmarks.load.figures import (
    SHAREGPT_OUTPUTS,
    SHAREGPT_PROMPTS,
    Goodput,
    Served,
    arrivals,
    figures,
    histogram_quantile,
    quantiles,
    waits_of,
)
from benchmarks.load.generator import parse
from tests.end_to_end.processes import TANDEM
from tests.paths import ROOT

COUNT = 4000
RATE = 25.0


def test_a_seed_decides_everything_and_another_seed_something_else() -> None:
    assert arrivals(50, RATE, 3) == arrivals(50, RATE, 3)
    assert arrivals(50, RATE, 3) != arrivals(50, RATE, 4)
    assert arrivals(20, RATE, 3) == arrivals(50, RATE, 3)[:20], "more requests leave the first as they are"


def test_gaps_are_exponential() -> None:
    times = [each.seconds for each in arrivals(COUNT, RATE, 0)]
    assert times[0] == 0.0
    gaps = [after - before for before, after in pairwise(times)]
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(1 / RATE, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / RATE, rel=0.1), (
        "an exponential's deviation is its mean"
    )
    assert sum(gap > 2 / RATE for gap in gaps) / len(gaps) == pytest.approx(math.exp(-2), rel=0.15)


@pytest.mark.parametrize("purpose", ["prompt_tokens", "output_tokens"])
def test_lengths_are_like_those_of_chats(purpose: str) -> None:
    lengths = [getattr(each, purpose) for each in arrivals(COUNT, RATE, 0)]
    wanted = SHAREGPT_PROMPTS if purpose == "prompt_tokens" else SHAREGPT_OUTPUTS
    assert statistics.median(lengths) == pytest.approx(wanted.median, rel=0.1)
    assert 160 < statistics.mean(lengths) < 240
    assert min(lengths) >= 4
    assert max(lengths) <= 1024


FAST = Served(10.0, 5, 4, [10.1, 10.2, 10.4], 10.5)
"""TTFT 100 ms, gaps of 100 and 200 ms, 500 ms in all, 133 ms by token after the first."""
SLOW = Served(11.0, 5, 1, [12.0], 12.0)
FAILED = Served(11.0, 5, 2, [11.5], 13.0, "ServiceUnavailableError")


def test_figures_count_what_was_completed_from_the_first_arrival_to_the_last_end() -> None:
    found = figures([FAST, SLOW, FAILED], Goodput({}), [50])
    assert (found.completed, found.failed, found.errors) == (2, 1, {"ServiceUnavailableError": 1})
    assert found.seconds == pytest.approx(3.0)
    assert (found.prompt_tokens, found.output_tokens) == (10, 5)
    assert found.requests_per_second == pytest.approx(2 / 3)
    assert found.output_tokens_per_second == pytest.approx(5 / 3)
    assert found.goodput is None
    assert found.latencies["ttft"].mean == pytest.approx(550.0)
    assert found.latencies["itl"].mean == pytest.approx(150.0)
    assert found.latencies["tpot"].mean == pytest.approx(400 / 3)
    assert found.latencies["e2el"].percentiles["p50"] == pytest.approx(750.0)


@pytest.mark.parametrize(
    ("words", "good"),
    [
        (["ttft:100.1"], 1),
        (["ttft:1001"], 2),
        (["ttft:99"], 0),
        (["itl:199"], 1),  # that of the single token, which waits for nothing
        (["ttft:500", "itl:201"], 1),
        (["ttft:500", "itl:199"], 0),
        (["tpot:134", "e2el:501"], 1),
    ],
)
def test_goodput_counts_requests_within_all_bounds(words: list[str], good: int) -> None:
    found = figures([FAST, SLOW, FAILED], Goodput.parse(words), [50])
    assert found.goodput == pytest.approx(good / 3.0)


def test_a_quantile_of_a_histogram_lies_inside_its_bucket() -> None:
    buckets = [(0.001, 50.0), (0.01, 100.0), (math.inf, 100.0)]
    assert histogram_quantile(buckets, 0.5) == pytest.approx(0.001)
    assert histogram_quantile(buckets, 0.75) == pytest.approx(0.0055)
    assert histogram_quantile([(0.001, 1.0), (math.inf, 100.0)], 0.99) == 0.001, "at least the last bound"
    assert histogram_quantile([(0.001, 0.0), (math.inf, 0.0)], 0.99) == 0.0


PAGE = """\
# TYPE tandem_round_phase_seconds histogram
tandem_round_phase_seconds_bucket{le="0.001",model_name="a",phase="verify"} 9.0
tandem_round_phase_seconds_bucket{le="0.001",model_name="a",phase="wait"} 4.0
tandem_round_phase_seconds_bucket{le="+Inf",model_name="a",phase="wait"} 4.0
tandem_round_phase_seconds_bucket{le="0.001",model_name="b",phase="wait"} 2.0
tandem_round_phase_seconds_bucket{le="+Inf",model_name="b",phase="wait"} 6.0
tandem_round_phase_seconds_sum{model_name="a",phase="wait"} 1.0
tandem_round_wait_seconds_bucket{le="0.001",model_name="a",place="answer"} 0.0
tandem_round_wait_seconds_bucket{le="0.01",model_name="a",place="answer"} 8.0
tandem_round_wait_seconds_bucket{le="+Inf",model_name="a",place="answer"} 8.0
"""


def test_counts_are_read_by_place_and_added_over_models() -> None:
    infinity = float("inf")
    assert waits_of(PAGE) == {
        "between": {0.001: 6.0, infinity: 10.0},
        "answer": {0.001: 0.0, 0.01: 8.0, infinity: 8.0},
    }


def test_quantiles_are_those_of_the_waits_between_two_readings() -> None:
    later = PAGE.replace(
        'le="0.01",model_name="a",place="answer"} 8', 'le="0.01",model_name="a",place="answer"} 10'
    )
    later = later.replace(
        'le="+Inf",model_name="a",place="answer"} 8', 'le="+Inf",model_name="a",place="answer"} 10'
    )
    found = quantiles(waits_of(PAGE), waits_of(later))
    assert found == {"answer": {"p50": pytest.approx(5.5), "p99": pytest.approx(9.91)}}


SCRIPT = Script(0.72)
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


def test_bench_sends_a_load_over_http_to_a_coordinator_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    command = [TANDEM, "bench", "--clients", "3", "--over", "http", "--requests", "6", "--verify-ms", "1"]
    command += ["--rule", "residual", "--workers", "2"]
    goodput = ("--goodput", "ttft:60000", "e2el:60000")
    done = subprocess.run(
        [*command, "--output-tokens", "20", "--measure-waits", *goodput, "--json", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "TTFT (ms)" in done.stdout
    report = json.loads(file.read_text(encoding="utf-8"))
    found = report["figures"]
    assert (found["completed"], found["failed"], found["output_tokens"]) == (6, 0, 6 * 20)
    assert report["options"]["over"] == "http"
    assert found["goodput"] == found["requests_per_second"]
    assert set(found["latencies"]) == {"ttft", "tpot", "itl", "e2el"}
    assert found["latencies"]["itl"]["percentiles"].keys() == {"p50", "p90", "p99"}
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
