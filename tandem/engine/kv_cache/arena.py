"""The KV arena: keys and values of every sequence in pages, allocated once."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tandem.engine.kv_cache.layer_groups import LayerGeometry, group_layers, kept_pages, most_pages
from tandem.engine.kv_cache.memory import memory_allowance
from tandem.engine.kv_cache.page_table import ROLLBACK_TOKENS, PageTable, pages_for
from tandem.engine.settings import EngineSettings
from tandem.errors import ConfigurationError

logger = logging.getLogger(__name__)

_PAGE_TOKENS_CPU = 64
"""A multiple of the kernels' vectors. Smaller pages share more of a prefix; attention looks up each page once."""
_PAGE_TOKENS_ACCELERATOR = 256

VARLEN_DTYPES = (torch.float16, torch.bfloat16)
VARLEN_WIDEST_HEAD = 256
"""The dtypes and head sizes that torch's `varlen_attn` serves."""


@dataclass(frozen=True, slots=True)
class KvUsage:
    """Usage of the KV cache, in tokens. A token's room is a place in each group of layers: those with a window need
    less, so more tokens than `total_tokens` may be in use."""

    total_tokens: int
    """Room in all."""
    reserved_tokens: int
    """Room in pages that open sequences hold, each page counted once."""
    used_tokens: int
    """Tokens of open sequences whose keys and values are computed. Shared ones count for each sequence."""
    retained_tokens: int
    """Room in pages that no sequence holds and whose content may be reused; taken whenever it is needed."""
    sequence_count: int
    waiting_count: int
    """Requests that wait because too many sequences are open."""
    preemption_count: int
    """Number of times that a sequence had to give its pages to an older one."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's part of the arena."""

    keys: Tensor
    """[pages + 1, page_tokens, kv_heads, key_dim]"""
    values: Tensor
    """[pages + 1, page_tokens, kv_heads, value_dim]"""
    padded_values: Tensor
    """The same with any numbers behind each value, as wide as a key, where `varlen_attn` wants it; see
    `stored_value_dim`."""
    group: int = 0
    """Which of a sequence's page tables says where its tokens lie."""


class KvArena:
    """Keys and values of `page_count` pages, and of a spare page that belongs to no sequence.

    A page holds tokens of the layers of one group (`layer_groups`): the n-th layers of all groups share a tensor.
    On a CPU the numbers of one head in one page are one contiguous matrix; elsewhere those of one token are, as torch's
    `varlen_attn` reads them. The order of the dimensions is the same.
    """

    def __init__(
        self, layers: SequenceOf[LayerGeometry], page_count: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.page_count = page_count
        self.page_tokens = page_tokens_on(device)
        groups = group_layers(layers)
        self.windows = tuple(group.window for group in groups)
        """Of each group of layers; None for those that keep all tokens, which come first."""
        self.storages = tuple(
            self._layer(layers[index], dtype, device)
            for index in max((group.layers for group in groups), key=len)
        )
        """The tensors that the layers share."""
        by_index = {
            index: replace(storage, group=number)
            for number, group in enumerate(groups)
            for index, storage in zip(group.layers, self.storages, strict=False)
        }
        self.layers = tuple(by_index[index] for index in range(len(layers)))

    @property
    def group_count(self) -> int:
        """Page tables that a sequence has."""
        return len(self.windows)

    @property
    def spare_page(self) -> int:
        """The page to which padding writes. Only padding reads it."""
        return self.page_count

    def kept_pages(self, start: int, end: int) -> int:
        """Pages of a sequence with `start` computed tokens and room for `end`."""
        return kept_pages(self.windows, start, end, self.page_tokens)

    def zero(self, tables: Iterable[PageTable], start: int, end: int) -> None:
        """Clears a sequence's positions from `start` up to `end` in every layer."""
        size = self.page_tokens
        for table in tables:
            for index in range(start // size, pages_for(end, size)):
                first, last = max(start - index * size, 0), min(end - index * size, size)
                page = table[index]
                for storage in self.storages:
                    storage.keys[page, first:last].zero_()
                    storage.values[page, first:last].zero_()

    def copy(self, source: int, target: int, count: int) -> None:
        """Copies the first `count` tokens of the page `source` to the page `target`, for all layers of a group."""
        for storage in self.storages:
            storage.keys[target, :count] = storage.keys[source, :count]
            storage.values[target, :count] = storage.values[source, :count]

    def move(self, tables: Iterable[PageTable], positions: SequenceOf[int], target: int) -> None:
        """Copies a sequence's tokens at some positions to those from `target` on, in every layer. They may overlap."""
        size = self.page_tokens
        both = np.stack((np.array(positions), np.arange(target, target + len(positions))))
        for table in tables:
            slots = table.slots_of(both)
            # One copy to the device for all four.
            (from_pages, to_pages), (from_places, to_places) = torch.from_numpy(
                np.stack((slots // size, slots % size))
            ).to(self.storages[0].keys.device)
            for storage in self.storages:
                for numbers in (storage.keys, storage.padded_values):
                    numbers[to_pages, to_places] = numbers[from_pages, from_places]

    def _layer(self, layer: LayerGeometry, dtype: torch.dtype, device: torch.device) -> LayerCache:
        keys = self._storage(layer.kv_heads, layer.key_dim, dtype, device)
        values = self._storage(layer.kv_heads, stored_value_dim(layer, dtype, device), dtype, device)
        return LayerCache(keys, values[..., : layer.value_dim], values)

    def _storage(self, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        sizes = (self.page_count + 1, self.page_tokens, heads, dim)
        if device.type == "cpu":
            by_head = torch.empty(sizes[0], heads, self.page_tokens, dim, dtype=dtype, device=device)
            storage = by_head.transpose(1, 2)
        else:
            storage = torch.empty(sizes, dtype=dtype, device=device)
        storage[self.spare_page].zero_()  # padding reads it, and must give finite numbers
        return storage


def page_tokens_on(device: torch.device) -> int:
    """Tokens of a page: `varlen_attn` demands multiples of 256 on CUDA."""
    return _PAGE_TOKENS_CPU if device.type == "cpu" else _PAGE_TOKENS_ACCELERATOR


def arena_pages(
    layers: SequenceOf[LayerGeometry],
    settings: EngineSettings,
    max_length: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Number of pages of the arena.

    Raises:
        ConfigurationError: not even one sequence of `max_length` fits what the settings allow.
    """
    size, groups = page_tokens_on(device), group_layers(layers)
    windows = [group.window for group in groups]
    page_bytes = bytes_of_page(layers, dtype, device)
    longest = most_pages(windows, max_length, max(settings.prefill_chunk_tokens, ROLLBACK_TOKENS), size)
    allowed_bytes = settings.kv_cache_bytes
    if allowed_bytes is None:
        allowed_bytes = memory_allowance(settings.device_memory_utilization, device)
    count = min(longest * settings.max_sequences, allowed_bytes // page_bytes)
    if count < longest:
        raise ConfigurationError(
            f"The KV cache may take {max(allowed_bytes, 0)} bytes, but one sequence of max_length {max_length} needs "
            f"{longest * page_bytes}; give it more memory or lower max_length."
        )
    tokens = count * size // len(groups)
    logger.info("kv cache sized", extra={"tokens": tokens, "bytes": count * page_bytes})
    return count


def bytes_of_page(layers: SequenceOf[LayerGeometry], dtype: torch.dtype, device: torch.device) -> int:
    """Bytes of a page's keys and values, in all layers of a group."""
    largest = max((group.layers for group in group_layers(layers)), key=len)
    numbers = sum(
        layers[index].kv_heads * (layers[index].key_dim + stored_value_dim(layers[index], dtype, device))
        for index in largest
    )
    return page_tokens_on(device) * numbers * dtype.itemsize


def stored_value_dim(layer: LayerGeometry, dtype: torch.dtype, device: torch.device) -> int:
    """Numbers of a stored value. `varlen_attn` takes keys and values of one width alone, so shorter values are padded
    where it serves; a copy of all of them in each step would take longer than reading the padding."""
    is_served = device.type == "cuda" and dtype in VARLEN_DTYPES and layer.key_dim <= VARLEN_WIDEST_HEAD
    return max(layer.key_dim, layer.value_dim) if is_served else layer.value_dim
