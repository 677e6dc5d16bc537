"""Packs the tokens of many sequences into one row for a step, and separates them for attention."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import accumulate

import torch
from torch import Tensor, nn

from tandem.engine.backends.eager.groups import Group, grouped
from tandem.engine.backends.packing import Packing
from tandem.engine.backends.paged.attention import paged_attention
from tandem.engine.backends.paged.pages import PageWriter
from tandem.engine.backends.paged.queries import PagedQueries
from tandem.engine.backends.paged.varlen import varlen_for
from tandem.engine.kv_cache.arena import KvArena, LayerCache, LayerGeometry
from tandem.engine.kv_cache.segment import Segment


class StepLayout(Packing):
    """One step: which tokens it runs, where their keys and values go, and what each attends to.

    Everything that layers share (masks, indices) is made once here. Where torch has a kernel that reads pages, it is
    called once for each layer; elsewhere, once for each group of sequences.
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
        self._writer = PageWriter.of_segments(self.segments, device)
        self._queries: PagedQueries | None = None

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
        self._writer.write(layer, key, value)
        if softcap is None and sinks is None and varlen_for(layer.keys, layer.values) is not None:
            return self._attend_at_once(geometry, layer, query, scale)
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

    def _part(self, group: Group, states: Tensor) -> Tensor:
        """A group's part of the packed queries, keys or values."""
        return states if len(self._groups) == 1 else states[:, :, group.token_start : group.token_end]

    def _attend_at_once(
        self, geometry: LayerGeometry, layer: LayerCache, query: Tensor, scale: float | None
    ) -> Tensor:
        if self._queries is None:
            self._queries = self._paged_queries()
        output = paged_attention(
            query[0].transpose(0, 1),
            layer.keys,
            layer.values,
            self._queries,
            window=geometry.window,
            scale=scale,
            softcap=None,
            sinks=None,
        )
        return output[None]

    def _paged_queries(self) -> PagedQueries:
        counts = [segment.token_count for segment in self.segments]
        tables = [segment.sequence.table.pages for segment in self.segments]
        width = max(map(len, tables))
        numbers = [page for pages in tables for page in pages + pages[-1:] * (width - len(pages))]
        lengths = [segment.end for segment in self.segments]
        # One copy to the device for all.
        packed = torch.tensor(
            [*numbers, *accumulate(counts, initial=0), *lengths], dtype=torch.int32, device=self._device
        )
        table, starts, ends = torch.split(packed, [len(numbers), len(counts) + 1, len(counts)])
        return PagedQueries(table.view(-1, width), starts, ends, max(counts), max(lengths))
