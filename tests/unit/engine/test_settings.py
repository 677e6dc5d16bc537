"""Limits of an engine that depend on its device."""

from __future__ import annotations

import pytest

from tandem.engine.settings import prefill_chunk_tokens


@pytest.mark.parametrize(
    ("chosen", "device", "tokens"),
    [(None, "cpu", 512), (None, "cuda", 2048), (64, "cpu", 64), (64, "cuda", 64)],
)
def test_a_step_on_a_gpu_reads_more_of_a_prompt_unless_a_number_is_chosen(
    chosen: int | None, device: str, tokens: int
) -> None:
    assert prefill_chunk_tokens(chosen, device) == tokens
