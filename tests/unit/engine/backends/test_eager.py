"""Sequences share an attention call where that pays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.engine.backends.eager import StepLayout
from tandem.engine.backends.trial import scattered_tables
from tandem.engine.kv_cache.arena import KvArena, LayerGeometry
from tandem.engine.kv_cache.sequence import Segment, Sequence

_GEOMETRY = [LayerGeometry(kv_heads=1, key_dim=4, value_dim=4)]
_CPU = torch.device("cpu")
_MODEL: Any = SimpleNamespace(layers=_GEOMETRY, dtype=torch.float32, device=_CPU)


def _segments(*computed_and_counts: tuple[int, int]) -> tuple[list[Segment], KvArena]:
    arena = KvArena(_GEOMETRY, 64, torch.float32, _CPU)
    size = arena.page_tokens
    tables = scattered_tables([(computed, computed + count) for computed, count in computed_and_counts], size)
    segments = []
    for table, (computed, count) in zip(tables, computed_and_counts, strict=True):
        sequence = Sequence(table, table[0].capacity, vocabulary_size=10)
        sequence.token_ids = [1] * (computed + count)
        sequence.advance(computed)
        segments.append(Segment(sequence, count))
    return segments, arena


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
    segments, arena = _segments(*sizes)
    layout = StepLayout(segments, arena, _MODEL)
    assert len(layout._groups) == group_count
    assert layout.token_count == sum(segment.token_count for segment in segments)
    assert len(layout.token_ids()) == len(layout.positions()) == layout.token_count
