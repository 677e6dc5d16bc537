"""Running models whose attention cannot be packed: one sequence per forward pass, with transformers' own attention.

What is lost is the batching of weights, not correctness: the keys and values are in the same arena, under the same
account, and a rollback is as free.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from tandem.engine.cache import KvArena, LayerCache
from tandem.engine.layout import Packing
from tandem.engine.segment import Segment


class SerialForward:
    """Calls a model once for each segment, each seeing the arena as a transformers cache."""

    def __init__(self, module: Any, arena: KvArena, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._layers = [_ArenaLayer(layer) for layer in arena.layers]
        self._cache = Cache(layers=list(self._layers))

    def __call__(self, packing: Packing, rows: list[int]) -> Tensor:
        """Logits of the packed tokens at `rows`, which ascend; [len(rows), vocabulary_size]."""
        logits = []
        packed = 0
        for segment in packing.segments:
            end = packed + segment.token_count
            logits.append(self._run(segment, [row - packed for row in rows if packed <= row < end]))
            packed = end
        return torch.cat(logits)

    def _run(self, segment: Segment, rows: list[int]) -> Tensor:
        """Logits of one sequence's tokens at `rows`."""
        for layer in self._layers:
            layer.point_to(segment)
        positions = torch.arange(segment.start, segment.end, device=self._device)[None]
        token_ids = torch.tensor([segment.token_ids()], device=self._device)
        arguments = forward_arguments(self._module, input_ids=token_ids, position_ids=positions)
        output = self._module(**arguments, past_key_values=self._cache, use_cache=True)
        logits: Tensor = output.logits[0]
        return logits[rows]


def forward_arguments(module: Any, **arguments: Tensor) -> dict[str, Tensor]:
    """Those of the arguments that the model's forward takes: models with relative positions take no position_ids."""
    known = inspect.signature(module.forward).parameters
    return {name: value for name, value in arguments.items() if name in known}


class _ArenaLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # its base's hook for subclasses is untyped
    """One layer of one sequence's extent, as transformers sees a cache."""

    def __init__(self, storage: LayerCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storage = storage
        self._start = 0
        self._offset = 0

    def point_to(self, segment: Segment) -> None:
        """Makes the layer the segment's sequence, as long as its KV is computed."""
        self._start = segment.sequence.extent.start
        self._offset = segment.start

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores [1, kv_heads, tokens, dim] and returns all keys and values of the sequence, without a copy."""
        first = self._start + self._offset
        end = first + key_states.shape[-2]
        keys, values = self._storage.keys, self._storage.values
        keys[:, :, first:end] = key_states
        values[:, :, first:end] = value_states
        return keys[:, :, self._start : end], values[:, :, self._start : end]

    def get_seq_length(self) -> int:
        """Tokens before this step."""
        return self._offset

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys in all, and the position of the first."""
        return self._offset + query_length, 0
