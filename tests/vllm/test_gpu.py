"""The campaign for a GPU runs on a CPU, with few tokens of the demo pair."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from tests.paths import DEVICE


@pytest.mark.timeout(1800)
def test_every_piece_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "gpu.jsonl"
    words = ["gpu", "--results", str(results), "--device", DEVICE, "--small"]
    monkeypatch.setattr(sys, "argv", words)
    gpu.main()
    records = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    ended = {each["piece"]: (each["exit_code"], each["said"]) for each in records}
    assert all(code == 0 for code, _ in ended.values()), ended
    assert list(ended) == ["tests", "text", "draft", "vllm", "head", "vllm-head", "steps", "paced"]
