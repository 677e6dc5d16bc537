"""Limits of an engine that depend on its device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.engine.settings import EngineSettings
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
