"""Running models whose attention cannot be packed: one sequence per forward pass, with transformers' own attention.

This loses the batching of weights, but not correctness: keys and values are in the same arena, and rollback is as
cheap.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from tandem.engine.backends.paged.pages import PageReader, PageWriter
from tandem.engine.kv_cache.arena import KvArena, LayerCache
from tandem.engine.kv_cache.sequence import Segment
from tandem.engine.models.attention import forward_arguments
from tandem.engine.models.loading import LoadedModel

_SMALL_STEP_TOKENS = 8


class SerialBackend:
    """Calls a model once for each segment, each seeing the arena as a transformers cache."""

    def __init__(self, model: LoadedModel, arena: KvArena) -> None:
        self._module = model.module
        self._device = model.device
        self._layers = [_ArenaLayer(layer) for layer in arena.layers]
        self._cache = Cache(layers=list(self._layers))

    @property
    def warm_up_steps(self) -> SequenceOf[tuple[int, ...]]:
        """See `StepBackend`."""
        return [(size,) for size in range(1, _SMALL_STEP_TOKENS + 1)]

    def prompt_tokens(self, limit: int) -> int:
        """See `StepBackend`."""
        return limit

    def accepts(self, segments: SequenceOf[Segment]) -> bool:
        """Any step."""
        return True

    def run(self, segments: SequenceOf[Segment], rows: SequenceOf[int]) -> Tensor:
        """See `StepBackend`."""
        logits = []
        first = 0
        for segment in segments:
            end = first + segment.token_count
            logits.append(self._run(segment, [row - first for row in rows if first <= row < end]))
            first = end
        return torch.cat(logits)

    def _run(self, segment: Segment, rows: list[int]) -> Tensor:
        """Logits of one sequence's tokens at `rows`."""
        writer = PageWriter.of_segments([segment], self._device)
        reader = PageReader.of_tables([segment.sequence.table], 0, segment.end, self._device)
        for layer in self._layers:
            layer.point_to(segment, writer, reader)
        positions = torch.arange(segment.start, segment.end, device=self._device)[None]
        token_ids = torch.tensor([segment.token_ids()], device=self._device)
        arguments = forward_arguments(self._module, input_ids=token_ids, position_ids=positions)
        output = self._module(**arguments, past_key_values=self._cache, use_cache=True)
        logits: Tensor = output.logits[0]
        return logits[rows]


class _ArenaLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # its base's hook for subclasses is untyped
    """One layer of one sequence, as transformers sees a cache."""

    def __init__(self, storage: LayerCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storage = storage
        self._segment: Segment | None = None
        self._writer: PageWriter | None = None
        self._reader: PageReader | None = None

    def point_to(self, segment: Segment, writer: PageWriter, reader: PageReader) -> None:
        """Makes the layer the segment's sequence, as long as its KV is computed."""
        self._segment, self._writer, self._reader = segment, writer, reader

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores [1, kv_heads, tokens, dim] and returns a copy of all keys and values of the sequence."""
        assert self._segment is not None
        assert self._writer is not None
        assert self._reader is not None
        self._writer.write(self._storage, key_states, value_states)
        end = self._segment.end
        keys, values = self._reader.read(self._storage.keys), self._reader.read(self._storage.values)
        return keys[:, :, :end], values[:, :, :end]

    def get_seq_length(self) -> int:
        """Tokens before this step."""
        return 0 if self._segment is None else self._segment.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys in all, and the position of the first."""
        return self.get_seq_length() + query_length, 0
