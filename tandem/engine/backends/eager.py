"""Steps by the model's own modules and torch's attention, on any device: the reference for all other backends.

Steps of branches are several continuations of each of some sequences, one token of each, over the keys and values of
their trunks. The trunk is what stands in the sequence. A branch leaves it after some of its tokens and goes on with
tokens of its own, whose keys and values lie behind the trunk in the sequence's pages: nothing is kept twice, and the
trunk is read once for all branches. A mask tells each branch what it sees, as in the tree attention of Medusa (Cai et
al. 2024, arXiv 2401.10774, section 3.1.2).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicLayer

from tandem.engine.kv_cache.arena import KvArena, LayerCache, PageReader, PageWriter
from tandem.engine.kv_cache.sequence import Segment
from tandem.engine.models.attention import Scoring, forward_arguments, grouped_attention
from tandem.engine.models.loading import LoadedModel
from tandem.engine.steps import BranchStep, Packing, StepBackend, run_modules


class _Seen(NamedTuple):
    """The keys that a group reads, and which of them each query sees."""

    first: int
    has_past: bool = True
    """False where a group's queries see their own step's keys alone."""
    mask: Tensor | None = None
    """Minus infinity for keys that are hidden and zero for others, for one head, repeated; None for none hidden."""
    is_causal: bool = False


class Group:
    """Parts of a step with equally many tokens, whose attention is one call: segments of similar lengths, or the
    branches of one sequence."""

    def __init__(self, part: Segment | BranchStep, model: LoadedModel) -> None:
        self.parts = [part]
        self.width = part.token_count
        self.longest = self._total = part.span(0)[2]
        """Keys of the longest sequence."""
        self._model = model
        self._readers: dict[tuple[int, int], PageReader] = {}
        self._spans: dict[tuple[int | None, int, bool], _Seen] = {}

    def take(self, part: Segment | BranchStep) -> bool:
        """Lets a segment join if it has the same width and pads little."""
        # Wider blocks keep the kernel busy one sequence at a time
        if isinstance(part, BranchStep) or part.token_count != self.width or self.width > 32:
            return False
        longest = max(self.longest, part.end)
        count = len(self.parts) + 1
        # Beyond so many superfluous keys another kernel call is cheaper (measured on a CPU, 8 heads of 32)
        if count * longest - (self._total + part.end) > count * 256:
            return False
        self.parts.append(part)
        self.longest = longest
        self._total += part.end
        return True

    def attend(
        self, layer: LayerCache, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Attention of the group's part, [1, heads, group_tokens, dim]; see `AttentionStep.attend`."""
        batch = len(self.parts)
        width = self.width
        heads = query.shape[1]
        kv_heads = layer.keys.shape[2]
        repeats = heads // kv_heads
        is_explicit = bool(scoring.softcap or scoring.sinks is not None)
        span_key = layer.window, repeats, is_explicit  # layers that are alike share what they see
        span = self._spans.get(span_key)
        if span is None:
            span = self._spans[span_key] = self._seen(*span_key)
        if span.has_past:
            key, value = (self._read(layer, storage, span.first) for storage in (layer.keys, layer.values))
        block = query if batch == 1 else query.view(heads, batch, width, -1).transpose(0, 1)
        if not span.is_causal and repeats > 1:
            block = block.reshape(batch, kv_heads, repeats * width, -1)
        sinks = scoring.sinks
        if sinks is not None:  # of each row: the queries that share a head of keys
            sinks = sinks.view(kv_heads, -1).repeat_interleave(width, dim=1)
        scoring = scoring._replace(sinks=sinks, mask=span.mask)
        output = grouped_attention(block, key, value, scoring, is_causal=span.is_causal)
        by_token = output.reshape(batch, heads, width, -1).transpose(1, 2)
        return by_token.reshape(1, batch * width, heads, -1)

    def _read(self, layer: LayerCache, storage: Tensor, first: int) -> Tensor:
        """The sequences' keys or values from the first position on, with zeros behind the end of each and before its
        window: a mask hides them, but hiding is arithmetic, and a NaN that another sequence left would survive it."""
        skipped = first % layer.keys.shape[1]
        reader = self._readers.get((layer.group, first - skipped))
        if reader is None:
            tables = [part.sequence.tables[layer.group] for part in self.parts]
            reader = PageReader(tables, first - skipped, self.longest, self._model.device)
            self._readers[layer.group, first - skipped] = reader
        found = reader.read(storage)[:, :, skipped : skipped + self.longest - first]
        for index, part in enumerate(self.parts):
            if isinstance(part, BranchStep):
                continue  # see `clear_room`
            if part.end < self.longest:
                found[index, :, part.end - first :].zero_()
            if layer.window is not None and (unseen := part.start - layer.window + 1 - first) > 0:
                found[index, :, :unseen].zero_()
        return found

    def _seen(self, window: int | None, repeats: int, is_explicit: bool) -> _Seen:
        part = self.parts[0]
        device = self._model.device
        positions = [list(each.positions()) for each in self.parts]
        starts = [min(own) for own in positions]
        first = 0
        if window is not None and window >= self.longest:
            window = None
        if window is not None:  # branches have their own keys behind the trunk in any case
            first = max(0, min(min(starts) - window + 1, part.sequence.length))
        has_past = True
        if isinstance(part, Segment):
            has_past = starts != [0]
            if self.width == 1 and len(set(starts)) == 1:
                return _Seen(first, has_past)
            if not has_past and window is None and not is_explicit:
                return _Seen(0, has_past=False, is_causal=True)
        queries = torch.tensor(positions, device=device)[:, None, :, None]  # [batch, 1, width, keys]
        slots = keys = torch.arange(first, self.longest, device=device)
        if isinstance(part, Segment):
            hidden = keys > queries
        else:
            behind = slots - part.sequence.length
            branches = len(part.trunk_lengths)
            trunks = queries - part.depth
            own = (behind >= 0) & (behind % branches == torch.arange(self.width, device=device)[:, None])
            # Position of each slot's token in the branch that sees it.
            keys = torch.where(own, trunks + behind // branches, slots)
            hidden = ~(own | (slots < trunks))
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=self._model.dtype, device=device)
        mask = mask.masked_fill_(hidden, float("-inf"))
        return _Seen(first, has_past, mask.repeat(1, 1, repeats, 1) if repeats > 1 else mask)


class StepLayout(Packing):
    """One step: attention is called once for each group of sequences in a layer. What layers share is made once."""

    def __init__(self, parts: SequenceOf[Segment | BranchStep], arena: KvArena, model: LoadedModel) -> None:
        self._groups: list[Group] = []
        if all(isinstance(part, Segment) for part in parts):  # so that similar ones follow each other
            parts = sorted(parts, key=lambda part: (part.token_count, part.span(0)[2]))
        for part in parts:
            if not self._groups or not self._groups[-1].take(part):
                self._groups.append(Group(part, model))
        super().__init__([part for group in self._groups for part in group.parts])
        self._arena = arena
        self._model = model
        self._writers = [PageWriter(self.spans(group), model.device) for group in range(arena.group_count)]

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

        `query` is [block_tokens, heads, key_dim], `key` and `value` [step_tokens, kv_heads, dim], `is_in_block` bool
        [step_tokens]; the result is [block_tokens, heads, value_dim].
        """
        layer_index: int = module.layer_idx  # type: ignore[assignment]
        layer = self._arena.layers[layer_index]
        self._writers[layer.group].write(layer, key.transpose(0, 1)[None], value.transpose(0, 1)[None])
        outputs = []
        first = 0
        token_start = 0
        in_block = is_in_block.tolist()
        for segment in self.segments:
            count = sum(in_block[token_start : token_start + segment.token_count])
            token_start += segment.token_count
            if count == 0:
                continue
            reader = PageReader([segment.sequence.tables[layer.group]], 0, segment.end, self._model.device)
            keys, values = (reader.read(each)[:, :, : segment.end] for each in (layer.keys, layer.values))
            block = query[None, first : first + count].transpose(1, 2)
            attended = functional.scaled_dot_product_attention(block, keys, values, enable_gqa=True)
            outputs.append(attended[0].transpose(0, 1))
            first += count
        return torch.cat(outputs) if outputs else query[:0, :, : value.shape[-1]]


def clear_room(arena: KvArena, part: BranchStep) -> None:
    """Zero what the branches will see of others' leftovers: a mask hides numbers, but not NaN."""
    sequence = part.sequence
    end = sequence.length + part.room
    if part.depth == 0 and sequence.clean_length < end:
        arena.zero(sequence.tables, max(sequence.clean_length, sequence.length), end)
        sequence.clean_length = end


class SerialBackend(StepBackend):
    """Calls a model once for each segment, each seeing the arena as a transformers cache."""

    def __init__(self, model: LoadedModel, arena: KvArena) -> None:
        self._model = model
        self._arena = arena
        self.returns_early = model.device.type != "cpu"

    def run(self, segments: SequenceOf[Segment], rows: SequenceOf[int]) -> Tensor:
        logits = []
        first = 0
        for segment in segments:
            wanted = [row - first for row in rows if 0 <= row - first < segment.token_count]
            logits.append(self._run(segment)[wanted])
            first += segment.token_count
        return torch.cat(logits)

    def _run(self, segment: Segment) -> Tensor:
        module = self._model.module
        device = self._model.device
        writer = PageWriter([segment.span(0)], device)
        reader = PageReader([segment.sequence.table], 0, segment.end, device)
        cache = Cache(layers=[_ArenaLayer(layer, segment, writer, reader) for layer in self._arena.layers])
        positions = torch.arange(segment.start, segment.end, device=device)[None]
        token_ids = torch.tensor([segment.token_ids], device=device)
        arguments = forward_arguments(module, input_ids=token_ids, position_ids=positions)
        logits: Tensor = module(**arguments, past_key_values=cache, use_cache=True).logits[0]
        return logits


class _ArenaLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # its base's hook for subclasses is untyped
    def __init__(self, storage: LayerCache, segment: Segment, writer: PageWriter, reader: PageReader) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storage = storage
        self._segment = segment
        self._writer = writer
        self._reader = reader

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores [1, kv_heads, tokens, dim] and returns a copy of all keys and values of the sequence."""
        self._writer.write(self._storage, key_states, value_states)
        end = self._segment.end
        keys = self._reader.read(self._storage.keys)
        values = self._reader.read(self._storage.values)
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
        self.returns_early = model.device.type != "cpu"

    def run(self, segments: SequenceOf[Segment], rows: SequenceOf[int]) -> Tensor:
        model = self._model
        layout = StepLayout(segments, self._arena, model)
        return run_modules(model.module, layout, layout.packed_rows(segments, rows), model.device)

    def run_branches(self, parts: SequenceOf[BranchStep]) -> Tensor:
        model = self._model
        for part in parts:
            clear_room(self._arena, part)
        layout = StepLayout(parts, self._arena, model)
        return run_modules(model.module, layout, range(layout.token_count), model.device)


def eager_backend(model: LoadedModel, arena: KvArena) -> StepBackend:
    """The backend that runs any step of this model."""
    return EagerBackend(model, arena) if model.is_packed else SerialBackend(model, arena)
