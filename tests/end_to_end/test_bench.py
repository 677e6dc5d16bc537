"""`tandem bench` with tiny settings, and what each of its contenders needs."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from benchmarks import bench, contenders, peers
from benchmarks.peers import Contender, Workload, load_transformers
from benchmarks.report import Report
from tandem_load import common, generator
from tests.commands import run_here
from tests.end_to_end.processes import NO_KERNELS, Service, ready
from tests.paths import DEMO_DRAFT, DEMO_TARGET


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Packages of the services that a benchmark starts, which come from the nursery and compute without kernels.

    So does the loop in one process, or it would spend most of a test on its start.
    """
    packages: list[str] = []

    @asynccontextmanager
    async def forked(package: str, *options: str) -> AsyncIterator[tuple[str, int]]:
        # The adaptive policy may decide that speculation does not pay for eight tokens.
        is_open = package == "tandem_coordinator" and "--speculation-policy" not in options
        policy = ("--speculation-policy", "fixed") if is_open else ()
        kernels = NO_KERNELS if "--model" in options else ()
        made = Service(package, *options, *policy, *kernels)
        packages.append(package)
        try:
            await asyncio.to_thread(ready, [made])
            yield made.address, made.pid
        finally:
            made.kill()

    monkeypatch.setattr(common, "process", forked)
    monkeypatch.setattr(generator, "process", forked)

    def peer(name: str, command: list[str], *rest: Any) -> AbstractAsyncContextManager[Contender]:
        moved = {"benchmarks.one_process": "tests.end_to_end.one_process"}
        return peers.peer(name, [moved.get(word, word) for word in command], *rest)

    monkeypatch.setattr(contenders, "peer", peer)
    return packages


@pytest.mark.slow
def test_with_a_fresh_coordinator_the_first_tokens_are_reported_apart(
    starts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    bench.run(
        [
            *("--pair", f"{DEMO_DRAFT}:{DEMO_DRAFT}", "--no-phases", "--fresh", "--pace", "1,1", "--eos"),
            *("--dtype", "float32", "--threads", "1"),
            *("--contenders", "target-alone --target-lead 0", "target-alone --target-lead 4"),
            *("--rounds", "1", "--max-tokens", "104", "--batch", "1", "--temperature", "0", "--no-prefix"),
        ]
    )

    assert starts == ["benchmarks.pace"] * 2 + ["tandem_coordinator"] * 2
    printed = capsys.readouterr().out
    assert "The first 100 tokens, and the rest" in printed
    led, steps = printed.partition("Rounds that the target began by itself")[2].split(
        "Steps of the paced target"
    )
    assert "target alone --target-lead 4" in led
    assert "target alone --target-lead 0" not in led
    assert "target alone --target-lead 0" in steps


@pytest.mark.soak
def test_the_other_engine_may_be_absent(starts: list[str], tmp_path: Path) -> None:
    """One of the runs of `make bench-gpu`, on a CPU: the own engine runs, and a vLLM that is not there is left out."""
    bench.run(
        [
            *("--device", "cpu", "--pair", f"{DEMO_TARGET}:{DEMO_DRAFT}", "--engine", "tandem"),
            *("--contenders", "target-alone,speculative,speculative-ahead,one-process,vllm"),
            *("--vllm-python", str(tmp_path / "python"), "--no-prefix", "--rounds", "1", "--batch", "1"),
            *("--temperature", "0", "--max-tokens", "8", "--threads", "1", "--no-phases"),
            *("--dtype", "float32", "--json", str(tmp_path / "json")),
        ]
    )

    report = Report.model_validate_json((tmp_path / "json").read_text())
    assert {cell.contender for cell in report.cells} == {
        *("target-alone", "speculative", "speculative-ahead", "one-process")
    }
    assert {cell.same_tokens for cell in report.cells} == {1.0}
    assert starts.count("tandem_target") == 1
    assert "did not start" in report.absent["vllm"]


@pytest.mark.slow
def test_bench_measures_tandem_and_its_peers(
    starts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / f"bench.{name}" for name in ("json", "markdown")}
    bench.run(
        [
            *("--pair", f"{DEMO_TARGET}:{DEMO_DRAFT}", "--dtype", "float32", "--threads", "1", "--no-prefix"),
            *("--contenders", "target-alone,speculative,dflash,one-process,vllm"),
            *("--rounds", "1", "--max-tokens", "8", "--batch", "2", "--temperature", "0"),
            *[word for name, file in files.items() for word in (f"--{name}", str(file))],
        ]
    )
    printed = capsys.readouterr().out

    report = Report.model_validate_json(files["json"].read_text())
    cells = {(cell.contender, cell.batch, cell.temperature): cell for cell in report.cells}
    ran = ("target-alone", "speculative", "one-process")
    assert cells.keys() == {(name, 2, 0.0) for name in ran}
    assert report.absent == {
        "vllm": "name a Python that has vLLM with --vllm-python",
        "dflash": "name the folder of the target's dflash head with --head",
    }
    for cell in cells.values():
        assert cell.speed.median > 0
        assert cell.same_tokens == 1.0, f"{cell.contender} wrote another text"
    for name in ("speculative", "one-process"):
        assert cells[name, 2, 0.0].acceptance_rate is not None, "nothing was drafted"
    assert cells["speculative", 2, 0.0].acceptance_rate == cells["one-process", 2, 0.0].acceptance_rate
    phases, wire = report.tables
    assert [row[0] for row in phases.rows] == ["services", "one process"]
    ((_, *sent),) = wire.rows
    assert all(isinstance(each, float) and 0 < each < 10_000 for each in sent)
    assert "Batch 2, temperature 0" in printed
    assert "## On the wire" in files["markdown"].read_text()


@pytest.mark.soak
def test_the_steps_of_both_engines_are_measured(
    starts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.run(
        [
            *("--pair", f"{DEMO_TARGET}:{DEMO_DRAFT}", "--contenders", "target-alone", "--steps"),
            *("--rounds", "1", "--batch", "1", "--temperature", "0", "--no-prefix", "--no-phases"),
            *("--json", str(tmp_path / "json")),
        ]
    )

    report = Report.model_validate_json((tmp_path / "json").read_text())
    (table,) = report.tables
    assert {row[0] for row in table.rows} >= {"target, 16 x 5", "draft, 1 x 512"}
    assert "Steps of the engine" in capsys.readouterr().out


@pytest.mark.slow
def test_a_load_is_sent_over_http_to_a_coordinator_of_its_own(starts: list[str], tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    command = ["bench", "--clients", "3", "--over", "http", "--requests", "6", "--verify-ms", "1"]
    command += ["--rule", "residual", "--output-tokens", "20", "--measure-waits"]
    done = run_here(*command, "--goodput", "ttft:60000", "e2el:60000", "--json", str(file))

    assert starts == ["tandem_load.fakes"] * 2 + ["tandem_coordinator"]
    assert "TTFT (ms)" in done.stdout
    report = json.loads(file.read_text(encoding="utf-8"))
    found = report["figures"]
    assert (found["completed"], found["failed"], found["output_tokens"]) == (6, 0, 6 * 20)
    assert report["options"]["over"] == "http"
    assert found["goodput"] == found["requests_per_second"]
    assert set(found["latencies"]) == {"ttft", "tpot", "itl", "e2el"}
    assert found["latencies"]["itl"].keys() == {"mean", "p50", "p90", "p99"}
    assert set(report["round_waits"]) == {"between", "event_loop", "answer", "question"}
    assert all(waits["p99"] >= waits["p50"] > 0 for waits in report["round_waits"].values())
    assert report["used"].keys() == {"coordinator", "target", "draft", "clients"}


def test_transformers_write_the_same_text_alone_and_assisted(prompts: list[str]) -> None:
    setup = {
        "target": str(DEMO_TARGET),
        "draft": str(DEMO_DRAFT),
        "threads": 1,
        "device": "cpu",
        "dtype": "float32",
        "num_speculative_tokens": 4,
    }
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    workload = Workload((tuple(tokenizer.encode(prompts[0]).ids),), 0.0, 12)
    alone, fixed, defaults = (
        load_transformers({**setup, "assistance": assistance})(workload)
        for assistance in ("", "fixed", "defaults")
    )

    assert len(alone.answers[0].token_ids) == 12
    assert alone.rounds == 0, "not known"
    for assisted in (fixed, defaults):
        assert assisted.answers[0].token_ids == alone.answers[0].token_ids
        assert 1 <= assisted.rounds < 12


def test_bench_without_the_repository_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where only the wheel is installed: it has what loads need."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "benchmarks.bench" else real(name, *rest),
    )
    ran = run_here("bench", "--rounds", "1")
    assert ran.returncode == 2
    assert "tandem bench needs benchmarks.bench, which is not installed here" in ran.stderr
    assert "Traceback" not in ran.stderr
