"""Groups of a step's segments that share an attention call of plain torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.backends.paged.pages import PageReader
from tandem.engine.kv_cache.arena import LayerCache, LayerGeometry
from tandem.engine.kv_cache.sequence import Segment
from tandem.engine.models.attention import grouped_attention

_WIDEST_BATCHED_BLOCK = 32
"""Blocks of more queries than this are attended to one sequence at a time: the kernel is then busy enough."""

_PADDING_WORTH_A_CALL = 256
"""Superfluous keys per sequence above which another kernel call is cheaper. Measured on CPU (8 heads of 32)."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Which keys a group reads, and which of them each query sees."""

    first: int
    """Position of the first key."""
    skipped: int
    """Keys before it in its page."""
    has_past: bool
    """False where a group's queries see their own step's keys alone."""
    mask: Tensor | None
    is_causal: bool


class Group:
    """Segments of one width and of similar lengths."""

    def __init__(self, first: Segment, token_start: int, dtype: torch.dtype, device: torch.device) -> None:
        self.segments = [first]
        self.width = first.token_count
        """Tokens of each segment."""
        self.token_start = token_start
        """Index of the group's first token among the packed tokens."""
        self.longest = first.end
        """Keys of the longest sequence."""
        self._total = first.end
        self._dtype = dtype
        self._device = device
        self._readers: dict[tuple[int, int], PageReader] = {}
        self._spans: dict[tuple[int | None, int, bool], _Span] = {}

    @property
    def token_end(self) -> int:
        """One past the last of the group's packed tokens."""
        return self.token_start + len(self.segments) * self.width

    def take(self, segment: Segment) -> bool:
        """Lets the segment join if it has the same width and pads little."""
        if segment.token_count != self.width or self.width > _WIDEST_BATCHED_BLOCK:
            return False
        longest, count = max(self.longest, segment.end), len(self.segments) + 1
        if count * longest - (self._total + segment.end) > count * _PADDING_WORTH_A_CALL:
            return False
        self.segments.append(segment)
        self.longest = longest
        self._total += segment.end
        return True

    def attend(
        self,
        geometry: LayerGeometry,
        layer: LayerCache,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention of the group's queries, whose keys and values are stored; see `AttentionStep.attend`.

        `query`, `key` and `value` are the group's part, [1, heads, group_tokens, dim].
        """
        batch, width, heads = len(self.segments), self.width, query.shape[1]
        repeats = heads // geometry.kv_heads
        span = self._span(geometry.window, repeats, explicit=softcap is not None or sinks is not None)
        if span.has_past:
            reader = self._reader(layer.group, span.first - span.skipped)
            key, value = (
                self._read(storage, reader, span, geometry.window) for storage in (layer.keys, layer.values)
            )
        block = query if batch == 1 else query.view(heads, batch, width, -1).transpose(0, 1)
        if not span.is_causal and repeats > 1:
            block = block.reshape(batch, geometry.kv_heads, repeats * width, -1)
        output = grouped_attention(
            block,
            key,
            value,
            mask=span.mask,
            is_causal=span.is_causal,
            scale=scale,
            softcap=softcap,
            sinks=_repeated(sinks, geometry.kv_heads, width),
        )
        if width == 1:
            return output.reshape(1, batch, heads, -1)
        output = output.view(batch, heads, width, -1).transpose(1, 2)
        return output.reshape(1, batch * width, heads, -1) if batch > 1 else output

    def _read(self, storage: Tensor, reader: PageReader, span: _Span, window: int | None) -> Tensor:
        """Keys or values that the group sees, with zeros behind the end of each sequence and before its window."""
        found = reader.read(storage)[:, :, span.skipped : span.skipped + self.longest - span.first]
        for index, segment in enumerate(self.segments):
            # A mask hides those keys, but hiding is arithmetic: a NaN that another sequence left would survive it.
            if segment.end < self.longest:
                found[index, :, segment.end - span.first :].zero_()
            if window is not None and (unseen := segment.start - window + 1 - span.first) > 0:
                found[index, :, :unseen].zero_()
        return found

    def _span(self, window: int | None, repeats: int, *, explicit: bool) -> _Span:
        """The keys for layers with this window; shared by all such layers of the step."""
        cache_key = (window, repeats, explicit)
        if cache_key not in self._spans:
            self._spans[cache_key] = self._make_span(window, repeats, explicit=explicit)
        return self._spans[cache_key]

    def _make_span(self, window: int | None, repeats: int, *, explicit: bool) -> _Span:
        if window is not None and window >= self.longest:
            window = None
        starts = {segment.start for segment in self.segments}
        first = 0 if window is None else max(0, min(starts) - window + 1)
        skipped = first % self.segments[0].sequence.table.page_tokens
        is_alone = len(self.segments) == 1
        has_past = not is_alone or starts != {0}
        if self.width == 1 and len(starts) == 1:
            return _Span(first, skipped, has_past, None, is_causal=False)
        if is_alone and starts == {0} and window is None and not explicit:
            return _Span(first, skipped, has_past, None, is_causal=True)
        return _Span(first, skipped, has_past, self._mask(window, first, repeats), is_causal=False)

    def _reader(self, table_group: int, start: int) -> PageReader:
        found = self._readers.get((table_group, start))
        if found is None:
            tables = [segment.sequence.tables[table_group] for segment in self.segments]
            found = PageReader.of_tables(tables, start, self.longest, self._device)
            self._readers[table_group, start] = found
        return found

    def _mask(self, window: int | None, first: int, repeats: int) -> Tensor:
        """Zero where a query sees a key and minus infinity elsewhere, [batch, 1, repeats * width, length]."""
        starts = torch.tensor([segment.start for segment in self.segments], device=self._device)
        queries = (starts[:, None] + torch.arange(self.width, device=self._device))[:, None, :, None]
        keys = torch.arange(first, self.longest, device=self._device)
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(
            hidden, float("-inf")
        )
        return mask.repeat(1, 1, repeats, 1) if repeats > 1 else mask


def _repeated(sinks: Tensor | None, kv_heads: int, width: int) -> Tensor | None:
    """A sink for each query of a group's tokens, where their queries share a head of keys."""
    return None if sinks is None else sinks.view(kv_heads, -1).repeat_interleave(width, dim=1)


def grouped(segments: Iterable[Segment], dtype: torch.dtype, device: torch.device) -> list[Group]:
    """The groups of a step, whose tokens are packed in their order."""
    groups: list[Group] = []
    token_start = 0
    for segment in sorted(segments, key=lambda segment: (segment.token_count, segment.end)):
        if not groups or not groups[-1].take(segment):
            groups.append(Group(segment, token_start, dtype, device))
        token_start += segment.token_count
    return groups
