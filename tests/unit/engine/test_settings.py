"""Limits of an engine that depend on its device."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tandem.engine.settings import EngineSettings
from tandem.engine.threads import switch_early, wait_asleep
from target_service.settings import TargetSettings


@pytest.mark.parametrize(
    ("chosen", "device", "tokens"),
    [(None, "cpu", 512), (None, "cuda", 2048), (64, "cpu", 64), (64, "cuda", 64)],
)
def test_a_step_on_a_gpu_reads_more_of_a_prompt_unless_a_number_is_chosen(
    chosen: int | None, device: str, tokens: int
) -> None:
    settings = TargetSettings(model=Path("m"), max_num_batched_tokens=chosen)
    assert EngineSettings.of(settings, device).prefill_chunk_tokens == tokens


def test_idle_threads_do_not_hold_a_core_unless_the_environment_wants_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "")
    monkeypatch.delenv("GOMP_SPINCOUNT")
    wait_asleep()
    assert os.environ["GOMP_SPINCOUNT"] == "1000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "300000")
    wait_asleep()
    assert os.environ["GOMP_SPINCOUNT"] == "300000"


def test_the_engine_does_not_wait_long_for_the_interpreter() -> None:
    before = sys.getswitchinterval()
    try:
        switch_early()
        assert sys.getswitchinterval() <= 0.001
    finally:
        sys.setswitchinterval(before)
