"""Steps of branches: several continuations of each of some sequences, one token of each, over the keys and values of
their trunks.

The trunk is what stands in the sequence. A branch leaves it after some of its tokens and goes on with tokens of its
own, whose keys and values lie behind the trunk in the sequence's pages: nothing is kept twice, and the trunk is read
once for all branches. A mask tells each branch what it sees, as in the tree attention of Medusa (Cai et al. 2024,
arXiv 2401.10774, section 3.1.2).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor, nn

from tandem.engine.kv_cache.arena import KvArena
from tandem.engine.kv_cache.pages import PageReader, PageWriter
from tandem.engine.models.attention import Scoring, for_rows, grouped_attention
from tandem.engine.models.loading import LoadedModel
from tandem.engine.steps import BranchPacking, SequenceBranches, run_modules


class EagerBranches:
    """Runs them by the model's own modules and torch's attention, on any device."""

    def __init__(self, model: LoadedModel, arena: KvArena) -> None:
        self._model = model
        self._arena = arena

    def run(self, parts: SequenceOf[SequenceBranches]) -> Tensor:
        """See `BranchRunner`."""
        model = self._model
        for part in parts:
            clear_room(self._arena, part)
        layout = BranchLayout(parts, self._arena, model)
        return run_modules(model.module, layout, range(layout.token_count), model.device)


def clear_room(arena: KvArena, part: SequenceBranches) -> None:
    """Zero what the branches will see of others' leftovers: a mask hides numbers, but not NaN."""
    sequence, step = part.sequence, part.step
    end = sequence.length + step.room
    if step.depth == 0 and sequence.clean_length < end:
        arena.zero(sequence.tables, max(sequence.clean_length, sequence.length), end)
        sequence.clean_length = end


class BranchLayout(BranchPacking):
    """One step of branches, as the attention layers see it: one sequence after the other."""

    def __init__(self, parts: SequenceOf[SequenceBranches], arena: KvArena, model: LoadedModel) -> None:
        super().__init__(parts)
        self._views = [BranchView(part, arena, model) for part in parts]

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """See `AttentionStep.attend`."""
        outputs, first = [], 0
        for view in self._views:
            own = slice(first, first + view.count)
            first = own.stop
            outputs.append(view.attend(module, query[:, :, own], key[:, :, own], value[:, :, own], scoring))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


class BranchView:
    """Attention of one sequence's branches."""

    def __init__(self, part: SequenceBranches, arena: KvArena, model: LoadedModel) -> None:
        self.count = part.count
        """Branches."""
        self._part = part
        self._arena = arena
        self._model = model
        self._masks: dict[tuple[int | None, int], Tensor] = {}
        self._length = part.written + part.count
        tables, device = part.sequence.tables, model.device
        self._writers = [
            PageWriter.of_spans([(table, part.written, self._length)], device) for table in tables
        ]
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
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scoring: Scoring,
    ) -> Tensor:
        """Store the branches' keys and values and attend; see `AttentionStep.attend`."""
        layer_index: int = module.layer_idx  # type: ignore[assignment]
        layer, geometry = self._arena.layers[layer_index], self._model.layers[layer_index]
        count, heads, first = self.count, query.shape[1], self._firsts[layer.group]
        length = self._length - first
        self._writers[layer.group].write(layer, key, value)
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
        count, width = self.count, len(step.trunk_lengths)
        trunk_lengths = torch.tensor(step.trunk_lengths[:count], device=device)[:, None]
        slots = torch.arange(first, self._length, device=device)[None]
        behind = slots - self._part.sequence.length
        own = (behind >= 0) & (behind % width == torch.arange(count, device=device)[:, None])
        # Position of each slot's token in the branch that sees it.
        positions = torch.where(own, trunk_lengths + behind // width, slots)
        hidden = ~(own | (slots < trunk_lengths))
        if window is not None:
            hidden |= positions <= trunk_lengths + step.depth - window
        mask = torch.zeros(hidden.shape, dtype=self._model.dtype, device=device)
        return mask.masked_fill_(hidden, float("-inf")).repeat(repeats, 1)[None, None]
