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

from tandem.engine.kv_cache.arena import KvArena, LayerCache, PageReader, PageWriter
from tandem.engine.kv_cache.sequence import Segment
from tandem.engine.models.attention import Scoring, forward_arguments, grouped_attention
from tandem.engine.models.loading import LoadedModel
from tandem.engine.steps import Packing, SequenceBranches, StepBackend, run_modules


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


class Group:
    """Parts of a step with equally many queries: the branches of a sequence, or what subclasses join."""

    def __init__(self, part: Segment | SequenceBranches, model: LoadedModel) -> None:
        self.parts = [part]
        self.width = part.token_count
        """Tokens of each part."""
        self.longest = part.span(0)[2]
        """Keys of the longest sequence."""
        self._model = model
        self._readers: dict[tuple[int, int], PageReader] = {}
        self._spans: dict[tuple[int | None, int, bool], _Seen] = {}

    def attend(
        self, layer: LayerCache, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Attention of the group's queries, whose keys and values are stored; see `AttentionStep.attend`.

        `query`, `key` and `value` are the group's part, [1, heads, group_tokens, dim].
        """
        batch, width, heads, kv_heads = len(self.parts), self.width, query.shape[1], layer.keys.shape[2]
        repeats, window = heads // kv_heads, layer.window
        is_explicit = bool(scoring.softcap or scoring.sinks is not None)
        span_key = window, repeats, is_explicit  # layers that are alike share what they see
        span = self._spans.get(span_key)
        if span is None:
            span = self._spans[span_key] = self._seen(window, repeats, is_explicit)
        if span.has_past:
            reader = self._reader(layer.group, span.first - span.skipped)
            key, value = (self._read(storage, reader, span, window) for storage in (layer.keys, layer.values))
        block = query if batch == 1 else query.view(heads, batch, width, -1).transpose(0, 1)
        if not span.is_causal and repeats > 1:
            block = block.reshape(batch, kv_heads, repeats * width, -1)
        sinks = scoring.sinks
        if sinks is not None:  # of each row: the queries that share a head of keys
            sinks = sinks.view(kv_heads, -1).repeat_interleave(width, dim=1)
        scoring = scoring._replace(sinks=sinks, mask=span.mask)
        output = grouped_attention(block, key, value, scoring, is_causal=span.is_causal)
        if width == 1:
            return output.reshape(1, batch, heads, -1)
        output = output.view(batch, heads, width, -1).transpose(1, 2)
        return output.reshape(1, batch * width, heads, -1) if batch > 1 else output

    def _read(self, storage: Tensor, reader: PageReader, span: _Seen, window: int | None) -> Tensor:
        return reader.read(storage)[:, :, span.skipped : span.skipped + self.longest - span.first]

    def _reader(self, table_group: int, start: int) -> PageReader:
        found = self._readers.get((table_group, start))
        if found is None:
            tables = [part.sequence.tables[table_group] for part in self.parts]
            found = PageReader.of_tables(tables, start, self.longest, self._model.device)
            self._readers[table_group, start] = found
        return found

    def _seen(self, window: int | None, repeats: int, is_explicit: bool) -> _Seen:
        (part,) = self.parts
        assert isinstance(part, SequenceBranches)
        step, device, first = part.step, self._model.device, 0
        if window is not None:  # their own keys lie behind the trunk in any case
            first = max(0, min(min(part.positions()) - window + 1, part.sequence.length))
        count, branches = self.width, len(step.trunk_lengths)
        trunk_lengths = torch.tensor(step.trunk_lengths[:count], device=device)[:, None]
        slots = torch.arange(first, self.longest, device=device)[None]
        behind = slots - part.sequence.length
        own = (behind >= 0) & (behind % branches == torch.arange(count, device=device)[:, None])
        # Position of each slot's token in the branch that sees it.
        positions = torch.where(own, trunk_lengths + behind // branches, slots)
        hidden = ~(own | (slots < trunk_lengths))
        if window is not None:
            hidden |= positions <= trunk_lengths + step.depth - window
        return self._masked(first, hidden[None, None], repeats, has_past=True)

    def _masked(self, first: int, hidden: Tensor, repeats: int, *, has_past: bool) -> _Seen:
        """All keys from the first one on but for those that are hidden, bool [batch, 1, width, length].

        The mask is minus infinity there and zero elsewhere, for one head, repeated.
        """
        mask = torch.zeros(hidden.shape, dtype=self._model.dtype, device=hidden.device)
        mask = mask.masked_fill_(hidden, float("-inf"))
        mask = mask.repeat(1, 1, repeats, 1) if repeats > 1 else mask
        return _Seen(first, first % self._page_tokens, has_past, mask, is_causal=False)

    @property
    def _page_tokens(self) -> int:
        return self.parts[0].sequence.table.page_tokens


class SegmentGroup(Group):
    """Segments of one width and of similar lengths."""

    parts: list[Segment]  # type: ignore[assignment]

    def __init__(self, first: Segment, model: LoadedModel) -> None:
        super().__init__(first, model)
        self._total = first.end

    def take(self, segment: Segment) -> bool:
        """Lets the segment join if it has the same width and pads little."""
        # Wider blocks keep the kernel busy one sequence at a time
        if segment.token_count != self.width or self.width > 32:
            return False
        longest, count = max(self.longest, segment.end), len(self.parts) + 1
        # Beyond so many superfluous keys another kernel call is cheaper (measured on a CPU, 8 heads of 32)
        if count * longest - (self._total + segment.end) > count * 256:
            return False
        self.parts.append(segment)
        self.longest = longest
        self._total += segment.end
        return True

    def _read(self, storage: Tensor, reader: PageReader, span: _Seen, window: int | None) -> Tensor:
        """With zeros behind the end of each sequence and before its window."""
        found = super()._read(storage, reader, span, window)
        for index, segment in enumerate(self.parts):
            # A mask hides those keys, but hiding is arithmetic: a NaN that another sequence left would survive it.
            if segment.end < self.longest:
                found[index, :, segment.end - span.first :].zero_()
            if window is not None and (unseen := segment.start - window + 1 - span.first) > 0:
                found[index, :, :unseen].zero_()
        return found

    def _seen(self, window: int | None, repeats: int, is_explicit: bool) -> _Seen:
        if window is not None and window >= self.longest:
            window = None
        starts = [segment.start for segment in self.parts]
        first = 0 if window is None else max(0, min(starts) - window + 1)
        begins_text = starts == [0]
        if self.width == 1 and len(set(starts)) == 1:
            return _Seen(first, first % self._page_tokens, not begins_text, None, is_causal=False)
        if begins_text and window is None and not is_explicit:
            return _Seen(0, 0, has_past=False, mask=None, is_causal=True)
        device = self._model.device
        queries = torch.tensor(starts, device=device)[:, None] + torch.arange(self.width, device=device)
        queries, keys = queries[:, None, :, None], torch.arange(first, self.longest, device=device)
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        return self._masked(first, hidden, repeats, has_past=not begins_text)


def grouped(parts: Iterable[Segment | SequenceBranches], model: LoadedModel) -> list[Group]:
    """The groups of a step, whose tokens are packed in their order. Branches have one for each sequence."""
    groups: list[Group] = [Group(part, model) for part in parts if isinstance(part, SequenceBranches)]
    segments = [part for part in parts if isinstance(part, Segment)]
    joined: list[SegmentGroup] = []
    for segment in sorted(segments, key=lambda segment: (segment.token_count, segment.end)):
        if not joined or not joined[-1].take(segment):
            joined.append(SegmentGroup(segment, model))
    return groups + joined


class StepLayout(Packing):
    """One step: which tokens it runs, where their keys and values go, and what each attends to.

    Attention is called once for each group of sequences in each layer; what layers share (masks, indices) is made once.
    """

    def __init__(
        self, parts: SequenceOf[Segment | SequenceBranches], arena: KvArena, model: LoadedModel
    ) -> None:
        self._groups = grouped(parts, model)
        super().__init__([part for group in self._groups for part in group.parts])
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
        layer = self._arena.layers[layer_index]
        self._writers[layer.group].write(layer, key, value)
        if len(self._groups) == 1:
            return self._groups[0].attend(layer, query, key, value, scoring)
        sizes = [len(group.parts) * group.width for group in self._groups]
        parts = zip(
            self._groups, *(torch.split(states, sizes, 2) for states in (query, key, value)), strict=True
        )
        return torch.cat([group.attend(layer, *own, scoring) for group, *own in parts], dim=1)

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
        self._arena = arena

    def run(self, segments: SequenceOf[Segment], rows: SequenceOf[int]) -> Tensor:
        logits = []
        first = 0
        for segment in segments:
            end = first + segment.token_count
            logits.append(self._run(segment, [row - first for row in rows if first <= row < end]))
            first = end
        return torch.cat(logits)

    def _run(self, segment: Segment, rows: list[int]) -> Tensor:
        writer = PageWriter.of_spans([segment.span(0)], self._device)
        reader = PageReader.of_tables([segment.sequence.table], 0, segment.end, self._device)
        cache = Cache(layers=[_ArenaLayer(layer, segment, writer, reader) for layer in self._arena.layers])
        positions = torch.arange(segment.start, segment.end, device=self._device)[None]
        token_ids = torch.tensor([segment.token_ids()], device=self._device)
        arguments = forward_arguments(self._module, input_ids=token_ids, position_ids=positions)
        output = self._module(**arguments, past_key_values=cache, use_cache=True)
        logits: Tensor = output.logits[0]
        return logits[rows]


class _ArenaLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # its base's hook for subclasses is untyped
    """One layer of one sequence, as transformers sees a cache."""

    def __init__(self, storage: LayerCache, segment: Segment, writer: PageWriter, reader: PageReader) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storage, self._segment, self._writer, self._reader = storage, segment, writer, reader

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores [1, kv_heads, tokens, dim] and returns a copy of all keys and values of the sequence."""
        self._writer.write(self._storage, key_states, value_states)
        end = self._segment.end
        keys, values = self._reader.read(self._storage.keys), self._reader.read(self._storage.values)
        return keys[:, :, :end], values[:, :, :end]

    def get_seq_length(self) -> int:
        return self._segment.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._segment.start + query_length, 0


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
        layout = StepLayout(parts, self._arena, model)
        return run_modules(model.module, layout, range(layout.token_count), model.device)


def eager_backend(model: LoadedModel, arena: KvArena) -> StepBackend:
    """The backend that runs any step of this model."""
    return EagerBackend(model, arena) if model.is_packed else SerialBackend(model, arena)
