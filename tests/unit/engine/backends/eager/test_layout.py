"""Sequences share an attention call where that is safe and pays."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tandem.engine.backends.eager.layout import StepLayout
from tandem.engine.kv_cache.arena import KvArena, LayerGeometry
from tandem.engine.kv_cache.extents import Extent
from tandem.engine.kv_cache.segment import Segment
from tandem.engine.kv_cache.sequence import Sequence
from tandem.types import Delta
from tests.unit.engine.conftest import TinyModel
from tests.unit.engine.greedy import RowsHead, plain_logits, rows, running

_GEOMETRY = [LayerGeometry(kv_heads=1, key_dim=4, value_dim=4)]


def _segment(start: int, capacity: int, computed: int, token_count: int) -> Segment:
    sequence = Sequence(Extent(start, capacity), capacity, vocabulary_size=10)
    sequence.apply(Delta(0, [1] * (computed + token_count)))
    sequence.advance(computed)
    return Segment(sequence, token_count)


@pytest.mark.parametrize(
    ("segments", "group_count"),
    [
        ([_segment(64 * index, 64, 10 + index, 1) for index in range(16)], 1),
        ([_segment(128 * index, 64, 10, 5) for index in range(8)], 1),  # others lie between them
        ([_segment(0, 64, 10, 1), _segment(64, 64, 10, 1), _segment(256, 64, 10, 1)], 2),  # unequal distances
        ([_segment(0, 64, 10, 1), _segment(64, 64, 10, 5)], 2),  # unequal widths
        (
            [_segment(0, 64, 0, 40), _segment(64, 64, 0, 40)],
            2,
        ),  # wide blocks keep the kernel busy by themselves
        (
            [_segment(0, 1024, 1, 1), _segment(1024, 1024, 900, 1)],
            2,
        ),  # the padding would cost more than a call
        (
            [_segment(0, 128, 99, 1), _segment(128, 64, 49, 1)],
            2,
        ),  # the shorter extent ends before the longer text
    ],
)
def test_sequences_of_similar_layout_share_a_call(segments: list[Segment], group_count: int) -> None:
    arena = KvArena(_GEOMETRY, 2048, torch.float32, torch.device("cpu"))
    layout = StepLayout(segments, arena, _GEOMETRY, torch.float32, torch.device("cpu"))
    assert len(layout._groups) == group_count
    assert layout.token_count == sum(segment.token_count for segment in segments)
    assert len(layout.token_ids()) == len(layout.positions()) == layout.token_count


async def test_a_long_text_beside_a_short_extent_at_the_end_of_the_arena(llama: TinyModel) -> None:
    bytes_per_token = 4 * sum(layer.values_per_token for layer in llama.loaded.layers)
    text = [3 + step % 90 for step in range(100)]
    async with running(
        llama.loaded, RowsHead(), max_length=128, kv_cache_bytes=192 * bytes_per_token
    ) as engine:
        long, short = await engine.open(128), await engine.open(64)
        await rows(engine, long, Delta(0, text), 1)
        await rows(engine, short, Delta(0, text[:50]), 1)
        both = await asyncio.gather(
            rows(engine, long, Delta(100, [7]), 1), rows(engine, short, Delta(50, [7]), 1)
        )
    for result, seen in zip(both, ([*text, 7], [*text[:50], 7]), strict=True):
        assert torch.allclose(result, plain_logits(llama.reference, seen)[-1:], atol=1e-3)
