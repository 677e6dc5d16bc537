"""Sequences share an attention call where that pays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.engine.backends.eager import StepLayout
from tandem.engine.backends.trial import trial_segments
from tandem.engine.kv_cache.arena import KvArena, LayerGeometry

_GEOMETRY = [LayerGeometry(kv_heads=1, key_dim=4, value_dim=4)]
_CPU = torch.device("cpu")
_MODEL: Any = SimpleNamespace(layers=_GEOMETRY, dtype=torch.float32, device=_CPU)


@pytest.mark.parametrize(
    ("sizes", "group_count"),
    [
        ([(10 + index, 1) for index in range(16)], 1),
        ([(10, 5)] * 8, 1),
        ([(10, 1), (10, 5)], 2),  # unequal widths
        ([(0, 40), (0, 40)], 2),  # wide blocks keep the kernel busy by themselves
        ([(1, 1), (900, 1)], 2),  # the padding would cost more than a call
        ([(900, 1), (1, 1), (890, 1), (3, 1)], 2),  # similar lengths find each other
    ],
)
def test_sequences_of_similar_size_share_a_call(sizes: list[tuple[int, int]], group_count: int) -> None:
    arena = KvArena(_GEOMETRY, 64, torch.float32, _CPU)
    segments = trial_segments(arena, 10, sizes)
    layout = StepLayout(segments, arena, _MODEL)
    assert len(layout._groups) == group_count
    assert layout.token_count == sum(segment.token_count for segment in segments)
    assert len(layout.token_ids()) == len(layout.positions()) == layout.token_count
