"""`make bench-gpu`: its options and its report, without a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import bench, gpu
from benchmarks.bench import BenchSettings
from benchmarks.contenders import CONTENDERS
from benchmarks.gpu import RUNS, GpuReport, gpus, options_of
from benchmarks.report import Cell, Machine, PairInfo, Report, Spread
from tandem.errors import ServiceUnavailableError
from tandem.model_sources import hub

NVIDIA_SMI = """#!/bin/sh
echo "$@" > "$0.asked"
echo "0, NVIDIA H100 80GB HBM3, 81559 MiB, 580.65, 700.00 W, 5"
echo "1, NVIDIA H100 80GB HBM3, 81559 MiB, 580.65, 700.00 W, 5"
"""


def measured(settings: BenchSettings, speed: float) -> Report:
    once = Spread(median=0.1, low=0.1, high=0.1)
    return Report(
        taken_at="2026-11-25 12:00 UTC",
        command="tandem bench",
        machine=Machine(processor="a CPU", cores=2, device=settings.device, load_before=0.0, versions={}),
        pair=PairInfo(name=settings.pair, target_parameters=2, draft_parameters=1),
        dtype=settings.dtype,
        threads=1,
        max_tokens=settings.max_tokens,
        num_speculative_tokens=4,
        rounds=1,
        titles={name: CONTENDERS[name].title for name in settings.contenders},
        cells=tuple(
            Cell(
                contender=name,
                batch=batch,
                temperature=0.0,
                tokens_per_second=(speed * batch,),
                first_token_seconds=once,
                inter_token_seconds_p50=0.1,
                inter_token_seconds_p99=0.1,
            )
            for name in settings.contenders
            for batch in settings.batch
        ),
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[BenchSettings]:
    """Settings of the runs that are measured. The own engine's fails."""
    found: list[BenchSettings] = []

    async def measure(settings: BenchSettings, progress: Callable[[str], None], command: str) -> Report:
        progress("starting the services")
        found.append(settings)
        if settings.engine == "tandem":
            raise ServiceUnavailableError("target_service did not start: exit code 1")
        return measured(settings, speed=10.0 * len(found))

    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(gpu, "configure", lambda level, form: None)
    return found


@pytest.mark.parametrize("name", RUNS)
def test_each_run_has_options_that_bench_knows(name: str) -> None:
    settings = bench.parse(options_of(name, ()))

    assert (settings.pair, settings.device) == (gpu.PAIR, "cuda")
    assert settings.batch == (1, 16, 64)
    assert settings.engine == (name.partition("-")[2] if name.startswith("engine") else "")
    is_ours = {CONTENDERS[each].is_ours for each in settings.contenders}
    assert is_ours == {name.startswith("engine")}, "a GPU has room for one of them"


def test_the_default_pair_is_two_hugging_face_ids() -> None:
    target, draft = gpu.PAIR.split(":")
    assert hub.is_model_id(target)
    assert hub.is_model_id(draft)


def test_a_failed_run_is_reported_and_the_others_go_on(
    asked: list[BenchSettings], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.run(["--folder", str(tmp_path), "--device", "cpu", "--batch", "1,2", "--draft-device", "cuda:1"])

    assert [settings.engine for settings in asked] == ["vllm", "tandem", "", ""]
    assert {settings.device for settings in asked} == {"cpu"}, "the user's option wins"
    assert {settings.vllm_python for settings in asked} == {Path(sys.executable)}
    report = GpuReport.model_validate_json((tmp_path / "gpu.json").read_text())
    assert report.runs.keys() == {"engine-vllm", "vllm", "vllm-draft"}
    assert report.failures == {"engine-tandem": "target_service did not start: exit code 1"}
    page = (tmp_path / "gpu.md").read_text()
    printed = capsys.readouterr()
    assert printed.out == page
    assert "please send both in" in printed.err
    assert "engine-vllm | Tandem, speculative | 10.0 | 20.0" in page
    assert "vllm-draft | vLLM, draft model | 40.0 | 80.0" in page
    assert "- engine-tandem failed: target_service did not start: exit code 1" in page
    assert "### Batch 2, temperature 0" in page


def test_runs_are_chosen(asked: list[BenchSettings], tmp_path: Path) -> None:
    gpu.run(["--folder", str(tmp_path), "--runs", "vllm", "--tensor-parallel-size", "2"])

    assert [(settings.contenders, settings.tensor_parallel_size) for settings in asked] == [(("vllm",), 2)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("--runs", "vllm,max"),
            "--runs has 'max'; it must be of engine-vllm, engine-tandem, vllm, vllm-draft",
        ),
        (("--batch", "0"), "batch.0 is 0"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(
    asked: list[BenchSettings], capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.run(arguments)

    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
    assert asked == []


def test_the_report_names_every_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(NVIDIA_SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert [line.split(", ")[1] for line in gpus()] == ["NVIDIA H100 80GB HBM3"] * 2
    assert "name,memory.total,driver_version" in (tmp_path / "nvidia-smi.asked").read_text()

    tool.write_text("#!/bin/sh\nexit 9\n")
    assert gpus() == ()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert gpus() == ()
