"""Frequencies that transformers chooses by the longest sequence of a batch do not depend on strangers here."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.models.loading import load_model
from tandem.types import Delta
from tests.unit.engine.greedy import RowsHead, plain_logits, rows, running
from tests.unit.engine.tiny_models import hf, save_checkpoint

_ORIGINAL = 32
_LONG = [5 + step % 80 for step in range(60)]


def _config() -> Any:
    return hf.Phi3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        original_max_position_embeddings=_ORIGINAL,
        initializer_range=0.3,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 100.0,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0, 3.0, 4.0, 5.0],
            "original_max_position_embeddings": _ORIGINAL,
        },
    )


async def test_a_long_stranger_does_not_change_a_short_text(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, _config())
    async with running(load_model(tmp_path, dtype="float32"), RowsHead(), prefix_reuse=False) as engine:
        short, long = await engine.open(64), await engine.open(64)
        alone = await rows(engine, short, Delta(0, _LONG[:9]), 9)
        beside, _ = await asyncio.gather(
            rows(engine, short, Delta(0, _LONG[:9]), 9), rows(engine, long, Delta(0, _LONG), 60)
        )
        after = await rows(engine, short, Delta(0, _LONG[:9]), 9)
    assert torch.allclose(alone, beside, atol=1e-4)
    assert torch.allclose(alone, after, atol=1e-4)


@pytest.mark.parametrize(("max_length", "length"), [(_ORIGINAL, 20), (128, 60)])
async def test_the_frequencies_are_those_of_the_longest_sequence(
    tmp_path: Path, max_length: int, length: int
) -> None:
    reference = save_checkpoint(tmp_path, _config())
    async with running(load_model(tmp_path, dtype="float32"), RowsHead(), max_length=max_length) as engine:
        sequence = await engine.open(max_length)
        result = await rows(engine, sequence, Delta(0, _LONG[:length]), length)
    assert torch.allclose(result, plain_logits(reference, _LONG[:length]), atol=1e-3)
