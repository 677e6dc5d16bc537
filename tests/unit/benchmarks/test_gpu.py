"""The measurements of a GPU, rehearsed on a CPU: a report with every figure, and a reason for what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.figures import GpuReport


def _report(folder: Path, *words: str) -> tuple[GpuReport, str]:
    files = folder / "gpu.json", folder / "gpu.md"
    main(["--device", "cpu", "--rounds", "1", "--json", str(files[0]), "--markdown", str(files[1]), *words])
    return GpuReport.model_validate_json(files[0].read_text()), files[1].read_text()


def test_steps_are_measured_beside_their_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, text = _report(tmp_path, "--models", "tiny", "--pair", "")
    assert text.strip() == capsys.readouterr().out.strip()
    (model,) = report.models
    assert {(step.sequences, step.width) for step in model.steps} == {(1, 1), (1, 5), (2, 1), (2, 5)}
    assert all(step.taken > 0 and step.bound > 0 for step in model.steps)
    assert "| 2 x 5 | 100 |" in text
    assert report.failures == ()


def test_what_cannot_be_measured_is_named_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, text = _report(tmp_path, "--models", "none", "--pair", "nowhere")
    assert report.pair is None
    assert report.models == ()
    (failure,) = report.failures
    assert failure.startswith("the pair: ConfigurationError: --pair is 'nowhere'; it must be demo")
    assert "**Not measured:** the pair" in text
