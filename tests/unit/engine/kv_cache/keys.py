"""Caches whose keys are numbers that show where they belong."""

from __future__ import annotations

import torch

from tandem.engine.kv_cache.arena import KvArena, LayerGeometry, PageTable
from tandem.engine.kv_cache.paged_cache import PagedCache
from tandem.engine.kv_cache.sequence import Sequence

Windows = tuple[int | None, ...]
"""Of the layers."""

MAX_LENGTH = 300


def new_arena(page_count: int, windows: Windows = (None,)) -> KvArena:
    """A layer for each window."""
    layers = [LayerGeometry(1, 1, 1, window) for window in windows]
    return KvArena(layers, page_count, torch.float32, torch.device("cpu"))


def new_sequence(max_length: int = MAX_LENGTH, windows: Windows = (None,)) -> Sequence:
    tables = [PageTable(64, max_length, window=window) for window in windows]
    return Sequence(tables, max_length, vocabulary_size=1000)


def keys_of(token_ids: list[int], layer: int = 0) -> list[float]:
    """A number for each token that depends on all tokens before it and on the layer, exactly a float32."""
    keys, key = [], 1
    for token_id in token_ids:
        key = (key * 31 + token_id + 1) % 1_000_003
        keys.append(key + layer / 4)
    return keys


def compute(arena: KvArena, cache: PagedCache, sequence: Sequence, count: int) -> None:
    """Compute a step: write the next tokens' keys, then publish their pages."""
    start, end = sequence.computed_length, sequence.computed_length + count
    for index, layer in enumerate(arena.layers):
        slots = torch.from_numpy(sequence.tables[layer.group].slots(start, end))
        keys = torch.tensor(keys_of(sequence.token_ids, index)[start:end])
        layer.keys[slots // 64, slots % 64, 0, 0] = keys
    sequence.advance(count)
    cache.computed(sequence)


def stored(arena: KvArena, sequence: Sequence, index: int = 0) -> list[float]:
    """The keys that the next token sees in a layer."""
    layer = arena.layers[index]
    table, end = sequence.tables[layer.group], sequence.computed_length
    first = 0 if table.window is None else max(0, end - table.window + 1)
    assert not end or table.first <= first // 64, "the page is still its own"
    slots = torch.from_numpy(table.slots(first, end))
    found: list[float] = layer.keys[slots // 64, slots % 64, 0, 0].tolist()
    return found
