"""The KV arena: keys and values of every sequence, allocated once."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tandem.engine.kv_cache.extents import GRANULE_TOKENS, granules
from tandem.engine.settings import EngineSettings
from tandem.errors import ConfigurationError

logger = logging.getLogger(__name__)

_CGROUP_MEMORY_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_DEFAULT_UTILIZATION_ACCELERATOR = 0.9
_DEFAULT_UTILIZATION_CPU = 0.3


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
    """Room set aside for open sequences."""
    used_tokens: int
    """Tokens of open sequences whose keys and values are computed."""
    retained_tokens: int
    """Room held by released sequences whose prefixes may be reused; freed whenever it is needed."""
    sequence_count: int
    waiting_count: int
    """Requests waiting for room."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's part of the arena."""

    keys: Tensor
    """[1, kv_heads, total_tokens + 1, key_dim]"""
    values: Tensor
    """[1, kv_heads, total_tokens + 1, value_dim]"""


class KvArena:
    """Storage for `total_tokens` tokens in every layer, and a spare one that belongs to no sequence.

    Heads come before tokens, so that the keys of one head of one sequence are one contiguous matrix; the leading
    dimension of 1 is that of transformers' batch and saves a call per access.
    """

    def __init__(
        self, layers: SequenceOf[LayerGeometry], total_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.total_tokens = total_tokens
        self.layers = tuple(
            LayerCache(
                _storage(layer.kv_heads, total_tokens, layer.key_dim, dtype, device),
                _storage(layer.kv_heads, total_tokens, layer.value_dim, dtype, device),
            )
            for layer in layers
        )

    def zero(self, start: int, end: int) -> None:
        """Clears the tokens from `start` up to `end` in every layer."""
        for layer in self.layers:
            layer.keys[:, :, start:end].zero_()
            layer.values[:, :, start:end].zero_()

    def copy(self, source: int, target: int, count: int) -> None:
        """Copies `count` tokens from `source` to `target` in every layer; the two may overlap."""
        if source == target:
            return
        overlaps = abs(source - target) < count
        for storage in (tensor for layer in self.layers for tensor in (layer.keys, layer.values)):
            tokens = storage[:, :, source : source + count]
            storage[:, :, target : target + count] = tokens.clone() if overlaps else tokens


def _storage(heads: int, tokens: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    storage = torch.empty(1, heads, tokens + 1, dim, dtype=dtype, device=device)
    storage[:, :, tokens:].zero_()  # padding reads it, and must give finite numbers
    return storage


def arena_tokens(
    layers: SequenceOf[LayerGeometry],
    settings: EngineSettings,
    max_length: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Number of tokens of the arena, a whole number of granules.

    Raises:
        ConfigurationError: not even one sequence of `max_length` fits what the settings allow.
    """
    bytes_per_token = sum(layer.values_per_token for layer in layers) * dtype.itemsize
    useful = granules(max_length) * settings.max_sequences
    allowed_bytes = settings.kv_cache_bytes
    if allowed_bytes is None:
        allowed_bytes = _memory_allowance(settings.device_memory_utilization, device)
    total = min(useful, allowed_bytes // bytes_per_token) // GRANULE_TOKENS * GRANULE_TOKENS
    if total < granules(max_length):
        raise ConfigurationError(
            f"The KV cache may take {max(allowed_bytes, 0)} bytes, but one sequence of max_length {max_length} needs "
            f"{granules(max_length) * bytes_per_token}; give it more memory or lower max_length."
        )
    logger.info("kv cache sized", extra={"tokens": total, "bytes": total * bytes_per_token})
    return total


def _memory_allowance(utilization: float | None, device: torch.device) -> int:
    """Bytes that the KV cache may take, now that the weights are loaded."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        share = _DEFAULT_UTILIZATION_ACCELERATOR if utilization is None else utilization
        return int(total * share) - (total - free)
    share = _DEFAULT_UTILIZATION_CPU if utilization is None else utilization
    page = os.sysconf("SC_PAGE_SIZE")
    total = min(os.sysconf("SC_PHYS_PAGES") * page, _cgroup_memory_limit())
    return int(total * share) - _resident_bytes()


def _cgroup_memory_limit() -> int:
    """Memory limit of the container, which the machine's own figure does not show."""
    for path in _CGROUP_MEMORY_LIMITS:
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            return int(text)
    return 1 << 62


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.is_file() else 0
