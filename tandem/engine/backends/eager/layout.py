"""Packs the tokens of many sequences into one row for a step, and separates them for attention."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor, nn
from torch.nn import functional

from tandem.engine.backends.eager.groups import Group, grouped
from tandem.engine.backends.packing import Packing
from tandem.engine.backends.paged.pages import PageWriter
from tandem.engine.kv_cache.arena import KvArena, LayerGeometry
from tandem.engine.kv_cache.sequence import Segment


class StepLayout(Packing):
    """One step: which tokens it runs, where their keys and values go, and what each attends to.

    Everything that layers share (masks, indices) is made once here. Attention is called once for each group of
    sequences in each layer.
    """

    def __init__(
        self,
        segments: Iterable[Segment],
        arena: KvArena,
        geometry: SequenceOf[LayerGeometry],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._arena = arena
        self._geometry = geometry
        self._device = device
        self._groups = grouped(segments, dtype, device)
        super().__init__([segment for group in self._groups for segment in group.segments])
        self._writers = [
            PageWriter.of_segments(self.segments, device, group) for group in range(arena.group_count)
        ]

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """See `AttentionStep.attend`. What is seen of the past is known from the layer; there is no `mask`."""
        layer_index: int = module.layer_idx  # type: ignore[assignment]
        geometry, layer = self._geometry[layer_index], self._arena.layers[layer_index]
        self._writers[layer.group].write(layer, key, value)
        outputs = [
            group.attend(
                geometry,
                layer,
                *(self._part(group, states) for states in (query, key, value)),
                scale=scale,
                softcap=softcap,
                sinks=sinks,
            )
            for group in self._groups
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def attend_blocks(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, is_in_block: Tensor
    ) -> Tensor:
        """Stores keys and values of all tokens; then the last tokens of each segment, its block, see each other both
        ways and all before them.

        Args:
            module: the calling layer, with its `layer_idx`.
            query: [block_tokens, heads, key_dim]
            key: [step_tokens, kv_heads, key_dim]
            value: [step_tokens, kv_heads, value_dim]
            is_in_block: bool [step_tokens]

        Returns:
            [block_tokens, heads, value_dim]
        """
        layer_index: int = module.layer_idx  # type: ignore[assignment]
        layer = self._arena.layers[layer_index]
        self._writers[layer.group].write(layer, key.transpose(0, 1)[None], value.transpose(0, 1)[None])
        outputs, first, token_start = [], 0, 0
        in_block = is_in_block.tolist()
        for segment in self.segments:
            count = sum(in_block[token_start : token_start + segment.token_count])
            token_start += segment.token_count
            if count == 0:
                continue
            slots = torch.from_numpy(segment.sequence.tables[layer.group].slots(0, segment.end))
            pages, places = slots // layer.keys.shape[1], slots % layer.keys.shape[1]
            keys, values = (
                storage[pages.to(self._device), places.to(self._device)].transpose(0, 1)
                for storage in (layer.keys, layer.values)
            )
            block = query[first : first + count].transpose(0, 1)
            outputs.append(
                functional.scaled_dot_product_attention(
                    block[None], keys[None], values[None], enable_gqa=block.shape[0] != keys.shape[0]
                )[0].transpose(0, 1)
            )
            first += count
        return torch.cat(outputs) if outputs else query[:0, :, : value.shape[-1]]

    def _part(self, group: Group, states: Tensor) -> Tensor:
        """A group's part of the packed queries, keys or values."""
        return states if len(self._groups) == 1 else states[:, :, group.token_start : group.token_end]
