"""`tandem bench` from end to end, with tiny settings."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.report import Report
from tests.end_to_end.processes import TANDEM, running

BENCH_SECONDS = 540.0
PAIR = "shaped:1M:1:0.7"


@pytest.mark.slow
def test_bench_measures_tandem_and_its_peers(tmp_path: Path) -> None:
    files = {name: tmp_path / f"bench.{name}" for name in ("json", "svg", "markdown")}
    with running(
        *(TANDEM, "bench", "--pair", PAIR, "--cache-folder", str(tmp_path / "cache")),
        *("--contenders", "target-alone,speculative,eagle3,one-process,transformers,vllm"),
        *("--rounds", "1", "--max-tokens", "4", "--batch", "2", "--threads", "1", "--dtype", "float32"),
        *[word for name, file in files.items() for word in (f"--{name}", str(file))],
        # The adaptive policy may decide that speculation does not pay for four tokens.
        environment={"TANDEM_COORDINATOR_SPECULATION_POLICY": "fixed"},
    ) as process:
        assert process.wait(BENCH_SECONDS) == 0, process.story
        printed = process.stdout

    report = Report.read(files["json"])
    ran = ("target-alone", "speculative", "one-process", "transformers")
    cells = {(cell.contender, cell.batch, cell.temperature): cell for cell in report.cells}
    assert cells.keys() == {(name, 2, heat) for name in ran for heat in (0.0, 1.0)}
    assert report.absent == {
        "vllm": "name a Python that has vLLM with --vllm-python",
        "eagle3": "name the folder of the target's eagle3 head with --head",
    }
    for cell in cells.values():
        assert cell.speed.median > 0
        assert cell.temperature > 0 or cell.same_tokens == 1.0, f"{cell.contender} wrote another text"
    for name in ("speculative", "one-process"):
        assert cells[name, 2, 0.0].acceptance_rate is not None, "nothing was drafted"
    assert cells["speculative", 2, 0.0].acceptance_rate == cells["one-process", 2, 0.0].acceptance_rate
    assert report.prefix is not None
    assert all(0 < wire.draft < 10_000 and 0 < wire.target < 10_000 for wire in report.wire)
    assert len(report.wire) == 2
    assert "Batch 2, temperature 0" in printed
    assert files["svg"].read_text().startswith("<svg")
    assert "## To be reached" in files["markdown"].read_text()


def test_bench_without_the_repository_is_a_clear_error(tmp_path: Path) -> None:
    # As where only the wheel is installed: the packages are there, `benchmarks` is not.
    code = (
        "import importlib.util as u, sys; real = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'benchmarks' else real(name, *rest)\n"
        "from coordinator.cli.main import app; app(sys.argv[1:])"
    )
    with running(sys.executable, "-c", code, "bench", "--rounds", "1") as process:
        assert process.wait(60) == 2, process.story
        assert "tandem bench needs benchmarks, which is not installed here" in process.stderr
        assert "Traceback" not in process.stderr
