"""The KV arena: keys and values of every sequence in pages, allocated once."""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.kv_cache.memory import memory_allowance
from tandem.engine.kv_cache.page_table import PageTable, pages_for
from tandem.engine.settings import EngineSettings
from tandem.errors import ConfigurationError

logger = logging.getLogger(__name__)

_PAGE_TOKENS_CPU = 64
"""A multiple of the kernels' vectors. Smaller pages share more of a prefix; attention looks up each page once."""
_PAGE_TOKENS_ACCELERATOR = 256


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """Geometry of one attention layer: what it stores per token, and its window."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    """Number of positions, its own included, that a token attends to; None for all before it."""

    @property
    def values_per_token(self) -> int:
        """Numbers stored for each token."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class KvUsage:
    """Usage of the KV cache, in tokens."""

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
    """How often a sequence had to give its pages to an older one."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's part of the arena."""

    keys: Tensor
    """[pages + 1, page_tokens, kv_heads, key_dim]"""
    values: Tensor
    """[pages + 1, page_tokens, kv_heads, value_dim]"""


class KvArena:
    """Keys and values of `page_count` pages in every layer, and of a spare page that belongs to no sequence.

    On a CPU the numbers of one head in one page are one contiguous matrix; elsewhere those of one token are, as torch's
    `varlen_attn` reads them. The order of the dimensions is the same.
    """

    def __init__(
        self, layers: SequenceOf[LayerGeometry], page_count: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.page_count = page_count
        self.page_tokens = page_tokens_on(device)
        self.layers = tuple(
            LayerCache(
                self._storage(layer.kv_heads, layer.key_dim, dtype, device),
                self._storage(layer.kv_heads, layer.value_dim, dtype, device),
            )
            for layer in layers
        )

    @property
    def spare_page(self) -> int:
        """The page to which padding writes. Only padding reads it."""
        return self.page_count

    def zero(self, table: PageTable, start: int, end: int) -> None:
        """Clears a sequence's positions from `start` up to `end` in every layer."""
        size = self.page_tokens
        for index in range(start // size, pages_for(end, size)):
            first, last = max(start - index * size, 0), min(end - index * size, size)
            page = table[index]
            for layer in self.layers:
                layer.keys[page, first:last].zero_()
                layer.values[page, first:last].zero_()

    def copy(self, source: int, target: int, count: int) -> None:
        """Copies the first `count` tokens of the page `source` to the page `target` in every layer."""
        for layer in self.layers:
            layer.keys[target, :count] = layer.keys[source, :count]
            layer.values[target, :count] = layer.values[source, :count]

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
    page_tokens = page_tokens_on(device)
    page_bytes = page_tokens * sum(layer.values_per_token for layer in layers) * dtype.itemsize
    longest = pages_for(max_length, page_tokens)
    allowed_bytes = settings.kv_cache_bytes
    if allowed_bytes is None:
        allowed_bytes = memory_allowance(settings.device_memory_utilization, device)
    count = min(longest * settings.max_sequences, allowed_bytes // page_bytes)
    if count < longest:
        raise ConfigurationError(
            f"The KV cache may take {max(allowed_bytes, 0)} bytes, but one sequence of max_length {max_length} needs "
            f"{longest * page_bytes}; give it more memory or lower max_length."
        )
    logger.info("kv cache sized", extra={"tokens": count * page_tokens, "bytes": count * page_bytes})
    return count
