"""Steps by the model's own modules and torch's attention, on any device: the reference for all other backends.

Steps of branches are several continuations of each of some sequences, one token of each, over the keys and values of
their trunks. The trunk is what stands in the sequence. A branch leaves it after some of its tokens and goes on with
tokens of its own, whose keys and values lie behind the trunk in the sequence's pages: nothing is kept twice, and the
trunk is read once for all branches. A mask tells each branch what it sees, as in the tree attention of Medusa (Cai et
al. 2024, arXiv 2401.10774, section 3.1.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicLayer

from tandem.engine.kv_cache.arena import KvArena, LayerCache, LayerGeometry
from tandem.engine.kv_cache.pages import PageReader, PageWriter
from tandem.engine.kv_cache.sequence import Segment
from tandem.engine.models.attention import Scoring, for_rows, forward_arguments, grouped_attention
from tandem.engine.models.loading import LoadedModel
from tandem.engine.steps import BranchPacking, Packing, SequenceBranches, StepBackend, run_modules


@dataclass(frozen=True, slots=True)
class _Seen:
    """The keys that a group reads, and which of them each query sees."""

    first: int
    """Position of the first key."""
    skipped: int
    """Keys before it in its page."""
    has_past: bool
    """False where a group's queries see their own step's keys alone."""
    mask: Tensor | None
    is_causal: bool


def _additive(hidden: Tensor, dtype: torch.dtype, repeats: int) -> Tensor:
    """Minus infinity where a key is hidden and zero elsewhere: [batch, 1, width, length] for one head, repeated."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
    return mask.repeat(1, 1, repeats, 1) if repeats > 1 else mask


class Group:
    """Segments of one width and of similar lengths."""

    def __init__(self, first: Segment, dtype: torch.dtype, device: torch.device) -> None:
        self.segments = [first]
        self.width = first.token_count
        """Tokens of each segment."""
        self.longest = first.end
        """Keys of the longest sequence."""
        self._total = first.end
        self._dtype = dtype
        self._device = device
        self._readers: dict[tuple[int, int], PageReader] = {}
        self._spans: dict[tuple[int | None, int, bool], _Seen] = {}

    @property
    def token_count(self) -> int:
        """Tokens of all segments."""
        return len(self.segments) * self.width

    def take(self, segment: Segment) -> bool:
        """Lets the segment join if it has the same width and pads little."""
        # Wider blocks keep the kernel busy one sequence at a time
        if segment.token_count != self.width or self.width > 32:
            return False
        longest, count = max(self.longest, segment.end), len(self.segments) + 1
        # Beyond so many superfluous keys another kernel call is cheaper (measured on a CPU, 8 heads of 32)
        if count * longest - (self._total + segment.end) > count * 256:
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
        scoring: Scoring,
    ) -> Tensor:
        """Attention of the group's queries, whose keys and values are stored; see `AttentionStep.attend`.

        `query`, `key` and `value` are the group's part, [1, heads, group_tokens, dim].
        """
        batch, width, heads = len(self.segments), self.width, query.shape[1]
        repeats = heads // geometry.kv_heads
        span = self._span(
            geometry.window, repeats, explicit=bool(scoring.softcap or scoring.sinks is not None)
        )
        if span.has_past:
            reader = self._reader(layer.group, span.first - span.skipped)
            key, value = (
                self._read(storage, reader, span, geometry.window) for storage in (layer.keys, layer.values)
            )
        block = query if batch == 1 else query.view(heads, batch, width, -1).transpose(0, 1)
        if not span.is_causal and repeats > 1:
            block = block.reshape(batch, geometry.kv_heads, repeats * width, -1)
        scoring = for_rows(scoring, span.mask, geometry.kv_heads, width)
        output = grouped_attention(block, key, value, scoring, is_causal=span.is_causal)
        if width == 1:
            return output.reshape(1, batch, heads, -1)
        output = output.view(batch, heads, width, -1).transpose(1, 2)
        return output.reshape(1, batch * width, heads, -1) if batch > 1 else output

    def _read(self, storage: Tensor, reader: PageReader, span: _Seen, window: int | None) -> Tensor:
        """Keys or values that the group sees, with zeros behind the end of each sequence and before its window."""
        found = reader.read(storage)[:, :, span.skipped : span.skipped + self.longest - span.first]
        for index, segment in enumerate(self.segments):
            # A mask hides those keys, but hiding is arithmetic: a NaN that another sequence left would survive it.
            if segment.end < self.longest:
                found[index, :, segment.end - span.first :].zero_()
            if window is not None and (unseen := segment.start - window + 1 - span.first) > 0:
                found[index, :, :unseen].zero_()
        return found

    def _span(self, window: int | None, repeats: int, *, explicit: bool) -> _Seen:
        """The keys for layers with this window; shared by all such layers of the step."""
        cache_key = (window, repeats, explicit)
        if cache_key not in self._spans:
            self._spans[cache_key] = self._make_span(window, repeats, explicit=explicit)
        return self._spans[cache_key]

    def _make_span(self, window: int | None, repeats: int, *, explicit: bool) -> _Seen:
        if window is not None and window >= self.longest:
            window = None
        starts = {segment.start for segment in self.segments}
        first = 0 if window is None else max(0, min(starts) - window + 1)
        skipped = first % self.segments[0].sequence.table.page_tokens
        is_alone = len(self.segments) == 1
        has_past = not is_alone or starts != {0}
        if self.width == 1 and len(starts) == 1:
            return _Seen(first, skipped, has_past, None, is_causal=False)
        if is_alone and starts == {0} and window is None and not explicit:
            return _Seen(first, skipped, has_past, None, is_causal=True)
        return _Seen(first, skipped, has_past, self._mask(window, first, repeats), is_causal=False)

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
        return _additive(hidden, self._dtype, repeats)


class BranchGroup:
    """Attention of one sequence's branches."""

    def __init__(self, part: SequenceBranches, model: LoadedModel) -> None:
        self.token_count = part.count
        """Branches."""
        self._part = part
        self._model = model
        self._masks: dict[tuple[int | None, int], Tensor] = {}
        self._length = part.written + part.count
        tables, device = part.sequence.tables, model.device
        # From the beginning of a page, whose first numbers a window may hide.
        self._firsts = [
            part.first_key(table.window) // table.page_tokens * table.page_tokens for table in tables
        ]
        self._readers = [
            PageReader.of_tables([table], first, self._length, device)
            for table, first in zip(tables, self._firsts, strict=True)
        ]

    def attend(
        self,
        geometry: LayerGeometry,
        layer: LayerCache,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scoring: Scoring,
    ) -> Tensor:
        count, heads, first = self.token_count, query.shape[1], self._firsts[layer.group]
        length = self._length - first
        reader = self._readers[layer.group]
        repeats = heads // geometry.kv_heads
        output = grouped_attention(
            query.reshape(1, geometry.kv_heads, repeats * count, -1),
            reader.read(layer.keys)[:, :, :length],
            reader.read(layer.values)[:, :, :length],
            for_rows(scoring, self._mask(geometry.window, repeats, first), geometry.kv_heads, count),
        )
        return output.view(1, heads, count, -1).transpose(1, 2)

    def _mask(self, window: int | None, repeats: int, first: int) -> Tensor:
        """Zero where a branch sees a key and minus infinity elsewhere, [1, 1, repeats * branches, length - first]."""
        found = self._masks.get((window, repeats))
        if found is None:
            found = self._masks[window, repeats] = self._made_mask(window, repeats, first)
        return found

    def _made_mask(self, window: int | None, repeats: int, first: int) -> Tensor:
        step, device = self._part.step, self._model.device
        count, width = self.token_count, len(step.trunk_lengths)
        trunk_lengths = torch.tensor(step.trunk_lengths[:count], device=device)[:, None]
        slots = torch.arange(first, self._length, device=device)[None]
        behind = slots - self._part.sequence.length
        own = (behind >= 0) & (behind % width == torch.arange(count, device=device)[:, None])
        # Position of each slot's token in the branch that sees it.
        positions = torch.where(own, trunk_lengths + behind // width, slots)
        hidden = ~(own | (slots < trunk_lengths))
        if window is not None:
            hidden |= positions <= trunk_lengths + step.depth - window
        return _additive(hidden[None, None], self._model.dtype, repeats)


def grouped(segments: Iterable[Segment], dtype: torch.dtype, device: torch.device) -> list[Group]:
    """The groups of a step, whose tokens are packed in their order."""
    groups: list[Group] = []
    for segment in sorted(segments, key=lambda segment: (segment.token_count, segment.end)):
        if not groups or not groups[-1].take(segment):
            groups.append(Group(segment, dtype, device))
    return groups


class GroupedAttention(Packing):
    """A packing whose attention is called once for each group of sequences in each layer.

    Everything that layers share (masks, indices) is made once, in the groups.
    """

    def share(self, groups: SequenceOf[Group | BranchGroup], arena: KvArena, model: LoadedModel) -> None:
        """Make what all layers share."""
        self._groups = groups
        self._arena = arena
        self._model = model
        self._writers = [
            PageWriter.of_spans(self.spans(group), model.device) for group in range(arena.group_count)
        ]

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """See `AttentionStep.attend`. What is seen of the past is known from the layer; there is no mask."""
        layer_index: int = module.layer_idx  # type: ignore[assignment]
        geometry, layer = self._model.layers[layer_index], self._arena.layers[layer_index]
        self._writers[layer.group].write(layer, key, value)
        if len(self._groups) == 1:
            return self._groups[0].attend(geometry, layer, query, key, value, scoring)
        outputs, first = [], 0
        for group in self._groups:
            own = slice(first, first + group.token_count)
            first = own.stop
            parts = query[:, :, own], key[:, :, own], value[:, :, own]
            outputs.append(group.attend(geometry, layer, *parts, scoring))
        return torch.cat(outputs, dim=1)


class StepLayout(GroupedAttention):
    """One step: which tokens it runs, where their keys and values go, and what each attends to."""

    def __init__(self, segments: Iterable[Segment], arena: KvArena, model: LoadedModel) -> None:
        groups = grouped(segments, model.dtype, model.device)
        super().__init__([segment for group in groups for segment in group.segments])
        self.share(groups, arena, model)

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
        outputs, first, token_start, device = [], 0, 0, self._model.device
        in_block = is_in_block.tolist()
        for segment in self.segments:
            count = sum(in_block[token_start : token_start + segment.token_count])
            token_start += segment.token_count
            if count == 0:
                continue
            slots = torch.from_numpy(segment.sequence.tables[layer.group].slots(0, segment.end))
            pages, places = slots // layer.keys.shape[1], slots % layer.keys.shape[1]
            keys, values = (
                storage[pages.to(device), places.to(device)].transpose(0, 1)
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


class BranchLayout(BranchPacking, GroupedAttention):
    """One step of branches, one sequence after the other."""

    def __init__(self, parts: SequenceOf[SequenceBranches], arena: KvArena, model: LoadedModel) -> None:
        super().__init__(parts)
        self.share([BranchGroup(part, model) for part in parts], arena, model)


def clear_room(arena: KvArena, part: SequenceBranches) -> None:
    """Zero what the branches will see of others' leftovers: a mask hides numbers, but not NaN."""
    sequence, step = part.sequence, part.step
    end = sequence.length + step.room
    if step.depth == 0 and sequence.clean_length < end:
        arena.zero(sequence.tables, max(sequence.clean_length, sequence.length), end)
        sequence.clean_length = end


class SerialBackend(StepBackend):
    """Calls a model once for each segment, each seeing the arena as a transformers cache."""

    def __init__(self, model: LoadedModel, arena: KvArena) -> None:
        self._module = model.module
        self._device = model.device
        self._layers = [_ArenaLayer(layer) for layer in arena.layers]
        self._cache = Cache(layers=list(self._layers))

    def run(self, segments: SequenceOf[Segment], rows: SequenceOf[int]) -> Tensor:
        logits = []
        first = 0
        for segment in segments:
            end = first + segment.token_count
            logits.append(self._run(segment, [row - first for row in rows if first <= row < end]))
            first = end
        return torch.cat(logits)

    def _run(self, segment: Segment, rows: list[int]) -> Tensor:
        writer = PageWriter.of_spans(Packing([segment]).spans(0), self._device)
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
        return 0 if self._segment is None else self._segment.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


class EagerBackend(StepBackend):
    """Runs any step of a model whose attention can be packed."""

    can_branch = writes_behind_trunk = True

    def __init__(self, model: LoadedModel, arena: KvArena) -> None:
        self._model = model
        self._arena = arena

    def run(self, segments: SequenceOf[Segment], rows: SequenceOf[int]) -> Tensor:
        model = self._model
        layout = StepLayout(segments, self._arena, model)
        return run_modules(model.module, layout, layout.packed_rows(segments, rows), model.device)

    def run_branches(self, parts: SequenceOf[SequenceBranches]) -> Tensor:
        model = self._model
        for part in parts:
            clear_room(self._arena, part)
        layout = BranchLayout(parts, self._arena, model)
        return run_modules(model.module, layout, range(layout.token_count), model.device)


def eager_backend(model: LoadedModel, arena: KvArena) -> StepBackend:
    """The backend that runs any step of this model."""
    return EagerBackend(model, arena) if model.is_packed else SerialBackend(model, arena)
