"""Sequences in scattered pages attend to what is theirs, and share an attention call where that pays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.engine.backends.eager import StepLayout, eager_backend
from tandem.engine.backends.trial import scattered_tables
from tandem.engine.kv_cache.arena import KvArena, LayerGeometry
from tandem.engine.kv_cache.sequence import Segment, Sequence
from tests.unit.engine.backends.by_hand import ByHand, some_tokens

_GEOMETRY = [LayerGeometry(kv_heads=1, key_dim=4, value_dim=4)]
_CPU = torch.device("cpu")

STEPS = [
    [some_tokens(130), some_tokens(3, 1), some_tokens(40, 2), some_tokens(40, 3)],
    [some_tokens(1), some_tokens(5, 1), some_tokens(1, 2), some_tokens(33, 3)],
    [some_tokens(5, 4), some_tokens(5, 5), some_tokens(5, 6), []],
    [some_tokens(1, 7), some_tokens(1, 8), some_tokens(1, 9), some_tokens(1, 10)],
    [[], some_tokens(1, 8), [], []],
]
"""Tokens of four sequences: whole prompts, then every mix of prompt parts, proposals and single tokens."""


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
    layout = StepLayout(segments, arena, _GEOMETRY, torch.float32, _CPU)
    assert len(layout._groups) == group_count
    assert layout.token_count == sum(segment.token_count for segment in segments)
    assert len(layout.token_ids()) == len(layout.positions()) == layout.token_count


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "gpt2", "bloom"])
def test_mixed_steps_agree_with_transformers(family: str, tmp_path: Path) -> None:
    """Whatever others left in the arena is NaN."""
    by_hand = ByHand(tmp_path, family)
    by_hand.poison()
    by_hand.check(eager_backend(by_hand.model, by_hand.arena), STEPS)


def test_a_shared_page_serves_both_sequences(tmp_path: Path) -> None:
    """As after prefix sharing: the second sequence reads the first one's page and writes to its own."""
    by_hand = ByHand(tmp_path, "llama")
    by_hand.poison()
    backend = eager_backend(by_hand.model, by_hand.arena)
    first, _, second = by_hand.sequences[:3]
    prefix = some_tokens(by_hand.arena.page_tokens)
    by_hand.step(backend, [[*prefix, 5, 6]])
    second.table.replace(0, first.table[0])
    second.token_ids = list(prefix)
    second.advance(len(prefix))
    by_hand.check(backend, [[[7, 8], [], [9, 10, 11]], [[1], [2], [3]]])
