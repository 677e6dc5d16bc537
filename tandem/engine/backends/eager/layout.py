"""Packs the tokens of many sequences into one row for a step, and separates them for attention."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tandem.engine.backends.packing import Packing
from tandem.engine.kv_cache.arena import KvArena, LayerGeometry
from tandem.engine.kv_cache.extents import granules
from tandem.engine.kv_cache.segment import Segment
from tandem.engine.models.attention import grouped_attention

_WIDEST_BATCHED_BLOCK = 32
"""Blocks of more queries than this are attended to one sequence at a time: the kernel is then busy enough."""

_PADDING_WORTH_A_CALL = 256
"""Superfluous keys per sequence above which another kernel call is cheaper. Measured on CPU (8 heads of 32)."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Which keys a group reads, and which of them each query sees."""

    first: int
    length: int
    mask: Tensor | None
    is_causal: bool


class _Group:
    """Segments of one width whose extents lie at equal distances, so that one strided view shows all their keys."""

    __slots__ = ("_capacity", "_total", "longest", "segments", "spacing", "spans", "token_start", "width")

    def __init__(self, first: Segment, token_start: int) -> None:
        self.segments = [first]
        self.width = first.token_count
        """Tokens of each segment."""
        self.spacing = 0
        """Distance between the extents, in tokens; 0 while there is only one."""
        self.token_start = token_start
        """Index of the group's first token among the packed tokens."""
        self.longest = first.end
        """Keys of the longest sequence."""
        self.spans: dict[tuple[int | None, int, bool], _Span] = {}
        self._capacity = first.sequence.extent.capacity
        self._total = first.end

    @property
    def base(self) -> int:
        """Start of the first sequence's extent."""
        return self.segments[0].sequence.extent.start

    @property
    def token_end(self) -> int:
        """One past the last of the group's packed tokens."""
        return self.token_start + len(self.segments) * self.width

    def take(self, segment: Segment) -> bool:
        """Lets the segment join if it has the same width, is next in the row of extents, and pads little."""
        extent = segment.sequence.extent
        spacing = extent.start - self.segments[-1].sequence.extent.start
        if segment.token_count != self.width or self.width > _WIDEST_BATCHED_BLOCK:
            return False
        if self.spacing and spacing != self.spacing:
            return False
        longest, capacity = max(self.longest, segment.end), min(self._capacity, extent.capacity)
        if longest > capacity:
            return False  # the view would reach into a neighbour's extent
        count = len(self.segments) + 1
        if count * longest - (self._total + segment.end) > count * _PADDING_WORTH_A_CALL:
            return False
        self.segments.append(segment)
        self.spacing, self.longest, self._capacity = spacing, longest, capacity
        self._total += segment.end
        return True


class StepLayout(Packing):
    """One step: which tokens it runs, where their keys and values go, and what each attends to.

    Everything that layers share (masks, indices) is made once here. A captured CUDA graph will replace the lists by
    static tensors of a bucket's size; `attend` is the only part that a graph records.
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
        self._dtype = dtype
        self._device = device
        self._groups = _grouped(segments)
        super().__init__([segment for group in self._groups for segment in group.segments])
        for group in self._groups:
            self._clear_padding(group)
        self._write_index = None if len(self.segments) == 1 else self._arena_positions()

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
        self._store(layer_index, key, value)
        geometry = self._geometry[layer_index]
        outputs = [
            self._attend_group(group, layer_index, geometry, query, scale=scale, softcap=softcap, sinks=sinks)
            for group in self._groups
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _store(self, layer_index: int, key: Tensor, value: Tensor) -> None:
        layer = self._arena.layers[layer_index]
        if self._write_index is not None:
            layer.keys.index_copy_(2, self._write_index, key)
            layer.values.index_copy_(2, self._write_index, value)
            return
        segment = self.segments[0]
        start = segment.sequence.extent.start + segment.start
        layer.keys.narrow(2, start, segment.token_count).copy_(key)
        layer.values.narrow(2, start, segment.token_count).copy_(value)

    def _attend_group(
        self,
        group: _Group,
        layer_index: int,
        geometry: LayerGeometry,
        query: Tensor,
        *,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Returns [1, group_tokens, heads, value_dim]."""
        batch, width, heads = len(group.segments), group.width, query.shape[1]
        repeats = heads // geometry.kv_heads
        span = self._span(group, geometry.window, repeats, explicit=softcap is not None or sinks is not None)
        layer = self._arena.layers[layer_index]
        keys, values = _strided(layer.keys, group, span), _strided(layer.values, group, span)
        block = query if len(self._groups) == 1 else query[:, :, group.token_start : group.token_end]
        if batch > 1:
            block = block.view(heads, batch, width, -1).transpose(0, 1)
        if not span.is_causal and repeats > 1:
            block = block.reshape(batch, geometry.kv_heads, repeats * width, -1)
        if sinks is not None:
            sinks = sinks.view(geometry.kv_heads, repeats).repeat_interleave(width, dim=1)
        output = grouped_attention(
            block,
            keys,
            values,
            mask=span.mask,
            is_causal=span.is_causal,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )
        if width == 1:
            return output.reshape(1, batch, heads, -1)
        output = output.view(batch, heads, width, -1).transpose(1, 2)
        return output.reshape(1, batch * width, heads, -1) if batch > 1 else output

    def _span(self, group: _Group, window: int | None, repeats: int, *, explicit: bool) -> _Span:
        """Mask of the group's queries in a layer with this window; shared by all such layers of the step."""
        cache_key = (window, repeats, explicit)
        if cache_key not in group.spans:
            group.spans[cache_key] = self._make_span(group, window, repeats, explicit=explicit)
        return group.spans[cache_key]

    def _make_span(self, group: _Group, window: int | None, repeats: int, *, explicit: bool) -> _Span:
        longest = group.longest
        if window is not None and window >= longest:
            window = None
        first = 0 if window is None else max(0, min(segment.start for segment in group.segments) - window + 1)
        length = longest - first
        starts = {segment.start for segment in group.segments}
        if group.width == 1 and len(starts) == 1:
            return _Span(first, length, None, is_causal=False)
        if len(group.segments) == 1 and group.width > 1 and starts == {0} and window is None and not explicit:
            return _Span(first, length, None, is_causal=True)
        return _Span(first, length, self._mask(group, window, first, length, repeats), is_causal=False)

    def _mask(self, group: _Group, window: int | None, first: int, length: int, repeats: int) -> Tensor:
        """Zero where a query sees a key and minus infinity elsewhere, [batch, 1, repeats * width, length]."""
        starts = torch.tensor([segment.start for segment in group.segments], device=self._device)
        queries = (starts[:, None] + torch.arange(group.width, device=self._device))[:, None, :, None]
        keys = torch.arange(first, first + length, device=self._device)
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(
            hidden, float("-inf")
        )
        return mask.repeat(1, 1, repeats, 1) if repeats > 1 else mask

    def _clear_padding(self, group: _Group) -> None:
        """Zeroes the group's view past the end of its shorter sequences.

        A mask hides those keys, but hiding is arithmetic: a NaN left there by another sequence would survive it.
        """
        if len(group.segments) == 1:
            return
        longest = group.longest
        for segment in group.segments:
            sequence = segment.sequence
            clean = max(sequence.clean_length, segment.end)
            if clean < longest:
                end = min(granules(longest), sequence.extent.capacity)
                self._arena.zero(sequence.extent.start + clean, sequence.extent.start + end)
                sequence.clean_length = end

    def _arena_positions(self) -> Tensor:
        positions = [
            position
            for segment in self.segments
            for position in range(
                segment.sequence.extent.start + segment.start, segment.sequence.extent.start + segment.end
            )
        ]
        return torch.tensor(positions, device=self._device)


def _grouped(segments: Iterable[Segment]) -> list[_Group]:
    groups: list[_Group] = []
    token_start = 0
    for segment in sorted(segments, key=lambda segment: (segment.token_count, segment.sequence.extent.start)):
        if not groups or not groups[-1].take(segment):
            groups.append(_Group(segment, token_start))
        token_start += segment.token_count
    return groups


def _strided(storage: Tensor, group: _Group, span: _Span) -> Tensor:
    """The group's keys or values without a copy, [batch, kv_heads, length, dim]."""
    start = group.base + span.first
    if len(group.segments) == 1:
        return storage.narrow(2, start, span.length)
    _, kv_heads, total_tokens, dim = storage.shape
    size = (len(group.segments), kv_heads, span.length, dim)
    return storage.as_strided(size, (group.spacing * dim, total_tokens * dim, dim, 1), start * dim)
