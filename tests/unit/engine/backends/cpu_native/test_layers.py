"""The attention kernel finds keys and values through page tables, wherever the pages lie."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tandem.engine.backends.cpu_native.layers import NativeAttention, places, point
from tandem.engine.backends.cpu_native.library.kernels import KernelCall, Kernels, Routine
from tandem.engine.kv_cache.arena import PAGE_TOKENS, KvArena, LayerGeometry, PageTable, pages_for
from tandem.engine.kv_cache.sequence import Segment, Sequence
from tandem.engine.models.attention import Scoring
from tandem.engine.steps import BranchStep, Packing

_CPU = torch.device("cpu")
_PAGE_TOKENS = PAGE_TOKENS
_HEADS, _KV_HEADS, _KEY_DIM, _VALUE_DIM = 6, 2, 40, 36
"""Dimensions are no whole number of vectors."""
_SCALE = 0.3
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}

_LENGTHS = [
    (0, 1), (0, 6), (1, 1), (15, 5), (16, 1), (60, 5), (63, 1), (64, 1), (70, 32), (27, 101), (0, 128), (190, 3),
]  # fmt: skip
"""Tokens that a sequence had, and tokens of the step."""


@dataclass(frozen=True)
class Variant:
    """A kind of attention layer."""

    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


_VARIANTS = [
    Variant(), Variant(window=9), Variant(window=75), Variant(softcap=4.0), Variant(has_sinks=True),
    Variant(window=75, softcap=4.0, has_sinks=True),
]  # fmt: skip


@dataclass(frozen=True)
class Work:
    """A sequence's tokens in a step, wherever its pages lie."""

    written: int
    """Tokens whose keys and values are there."""
    count: int
    step: BranchStep | None = None
    trunk: int = 0

    @property
    def end(self) -> int:
        return self.written + self.count

    def sequence(self, table: PageTable) -> Sequence:
        sequence = Sequence(table, table.capacity, 10)
        sequence.token_ids = [0] * (self.end if self.step is None else self.trunk)
        sequence.advance(self.written if self.step is None else self.trunk)
        return sequence

    def seen(self, window: int | None) -> Tensor:
        """The keys that each token attends to, bool [count, end]."""
        slots, tokens = torch.arange(self.end)[None], torch.arange(self.count)[:, None]
        if self.step is None:
            queries, positions = self.written + tokens, slots
            visible = slots <= queries
        else:
            lengths = torch.tensor(self.step.trunk_lengths[: self.count])[:, None]
            width = len(self.step.trunk_lengths)
            behind = slots - self.trunk
            own = (behind >= 0) & (behind % width == tokens)
            queries, positions = lengths + self.step.depth, torch.where(own, lengths + behind // width, slots)
            visible = own | (slots < lengths)
        return visible if window is None else visible & (positions > queries - window)


def _branches(trunk: int, lengths: list[int], depth: int, count: int) -> Work:
    nobody = Sequence(PageTable(_PAGE_TOKENS, 1), 1, 10)
    step = BranchStep(nobody, [0] * count, lengths, depth, depth + 1)
    return Work(trunk + depth * len(lengths), count, step, trunk)


_WORKS = [Work(*lengths) for lengths in _LENGTHS]
_BRANCHES = [
    _branches(8, [5, 6, 6, 8, 7], 0, 5), _branches(60, [60, 58, 50], 3, 2), _branches(130, [129, 130], 2, 2),
    _branches(64, [64, 1, 63], 1, 3),
]  # fmt: skip


def _tables(works: SequenceOf[Work], seed: int | None = None) -> list[PageTable]:
    """Page tables of consecutive pages, or of pages in an order that the seed gives."""
    counts = [pages_for(work.end, _PAGE_TOKENS) for work in works]
    pages = list(range(sum(counts)))
    if seed is not None:
        random.Random(seed).shuffle(pages)
    unused = iter(pages)
    return [
        PageTable(_PAGE_TOKENS, count * _PAGE_TOKENS, [next(unused) for _ in range(count)])
        for count in counts
    ]


class Case:
    """A step of sequences with everything that it reads."""

    def __init__(self, works: SequenceOf[Work], dtype: torch.dtype, variant: Variant) -> None:
        self.works, self.dtype, self.variant = works, dtype, variant
        self._generator = torch.Generator().manual_seed(3)
        self.pasts = [
            tuple(self._numbers(work.written, _KV_HEADS, dim) for dim in (_KEY_DIM, _VALUE_DIM))
            for work in works
        ]
        self.token_count = sum(work.count for work in works)
        # As models lay them: tokens before heads, seen the other way round.
        self.query, self.key, self.value = (
            self._numbers(1, self.token_count, count, dim).transpose(1, 2)
            for count, dim in ((_HEADS, _KEY_DIM), (_KV_HEADS, _KEY_DIM), (_KV_HEADS, _VALUE_DIM))
        )
        self.sinks = self._numbers(_HEADS).float() if variant.has_sinks else None

    def _numbers(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.dtype)

    def part(self, index: int) -> slice:
        """The tokens of one sequence in the step."""
        first = sum(work.count for work in self.works[:index])
        return slice(first, first + self.works[index].count)

    def run(
        self,
        kernels: Kernels,
        tables: list[PageTable],
        only: int | None = None,
        *,
        keeps_window: bool = False,
    ) -> tuple[Tensor, KvArena]:
        """Attention of all sequences, or of one of them alone; NaN lies wherever the step writes and reads nothing, and
        with `keeps_window` in pages wholly before what is seen, as if they were another's."""
        indices = range(len(self.works)) if only is None else [only]
        geometry = LayerGeometry(_KV_HEADS, _KEY_DIM, _VALUE_DIM, self.variant.window)
        arena = KvArena([geometry], sum(map(len, tables)), self.dtype, _CPU)
        layer = arena.layers[0]
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
        sequences = []
        for index in indices:
            table, work = tables[index], self.works[index]
            slots = torch.from_numpy(table.slots(0, work.written))
            where = slots // _PAGE_TOKENS, slots % _PAGE_TOKENS
            layer.keys[where], layer.values[where] = self.pasts[index]
            if keeps_window:
                first = int(work.seen(self.variant.window).any(dim=0).nonzero()[0])
                for page in table.pages[: first // _PAGE_TOKENS]:
                    layer.keys[page] = layer.values[page] = float("nan")
            sequences.append(work.sequence(table))
        tokens = [token for index in indices for token in range(*self.part(index).indices(self.token_count))]
        attention = NativeAttention(kernels, arena)
        return self._attend(attention, self._packing(indices, sequences), tokens), arena

    def _packing(self, indices: SequenceOf[int], sequences: list[Sequence]) -> Packing:
        works = zip(sequences, (self.works[index] for index in indices), strict=True)
        pairs = [(sequence, work.count, work.step) for sequence, work in works]
        if branches := [replace(step, sequence=sequence) for sequence, _, step in pairs if step is not None]:
            return Packing(branches)
        return Packing([Segment(sequence, count) for sequence, count, _ in pairs])

    def _attend(self, attention: NativeAttention, packing: Packing, tokens: list[int]) -> Tensor:
        query, key, value = (
            states.transpose(1, 2)[:, tokens].transpose(1, 2) for states in (self.query, self.key, self.value)
        )
        output = query.new_empty((1, len(tokens), _HEADS, _VALUE_DIM))
        call, where = attention.new_call(0), torch.tensor(places(packing))
        point(call, query, key, value, output, Scoring(_SCALE, self.variant.softcap, self.sinks))
        call.segments = where.data_ptr()
        attention.kernels.run(KernelCall(Routine.ATTEND, call))
        return output

    def stored(self, index: int) -> tuple[Tensor, Tensor]:
        """A sequence's keys and values after the step, [end, kv_heads, dim]."""
        part = self.part(index)
        keys, values = self.pasts[index]
        new_keys, new_values = (states[0, :, part].transpose(0, 1) for states in (self.key, self.value))
        return torch.cat((keys, new_keys)), torch.cat((values, new_values))

    def expected(self, index: int) -> Tensor:
        """A sequence's attention in float64, [1, count, heads, value_dim]."""
        keys, values = (
            states.double().repeat_interleave(_HEADS // _KV_HEADS, dim=1) for states in self.stored(index)
        )
        query = self.query[0, :, self.part(index)].double()
        scores = torch.einsum("hqd,khd->hqk", query, keys) * _SCALE
        if self.variant.softcap is not None:
            scores = torch.tanh(scores / self.variant.softcap) * self.variant.softcap
        scores = scores.masked_fill(~self.works[index].seen(self.variant.window), float("-inf"))
        if self.sinks is not None:
            column = self.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = scores.softmax(dim=-1)[..., : keys.shape[0]]
        return torch.einsum("hqk,khd->qhd", weights, values)[None]


_cases = pytest.mark.parametrize(
    ("works", "variant", "dtype"),
    [
        pytest.param(works, variant, dtype, id=f"{name}-{variant}-{dtype}")
        for name, works in (("segments", _WORKS), ("branches", _BRANCHES))
        for variant in _VARIANTS
        for dtype in _TOLERANCES
    ],
)


@_cases
def test_attention_over_scattered_pages_is_plain_attention(
    kernels: Kernels, works: list[Work], variant: Variant, dtype: torch.dtype
) -> None:
    case, tables = Case(works, dtype, variant), _tables(works, seed=1)
    results, arena = case.run(kernels, tables)
    keys, values = (states.flatten(0, 1) for states in (arena.layers[0].keys, arena.layers[0].values))
    for index, (work, table) in enumerate(zip(works, tables, strict=True)):
        difference = (results[:, case.part(index)].double() - case.expected(index)).abs().max()
        assert difference <= _TOLERANCES[dtype], (work, difference)
        slots = torch.from_numpy(table.slots(0, work.end))
        assert torch.equal(keys[slots], case.stored(index)[0])
        assert torch.equal(values[slots], case.stored(index)[1])
    for states in (keys, values):  # the rest is as it was
        written = sum(work.end for work in works)
        assert int((~states.isnan()).all(dim=2).all(dim=1).sum()) == written


@_cases
def test_pages_before_a_window_may_be_those_of_others(
    kernels: Kernels, works: list[Work], variant: Variant, dtype: torch.dtype
) -> None:
    case, tables = Case(works, dtype, variant), _tables(works, seed=1)
    expected, _ = case.run(kernels, tables)
    results, _ = case.run(kernels, tables, keeps_window=True)
    assert torch.equal(results, expected)


@_cases
def test_bits_do_not_depend_on_the_other_sequences(
    kernels: Kernels, works: list[Work], variant: Variant, dtype: torch.dtype
) -> None:
    case, tables = Case(works, dtype, variant), _tables(works, seed=1)
    together, _ = case.run(kernels, tables)
    for index in range(len(works)):
        alone, _ = case.run(kernels, tables, only=index)
        assert torch.equal(alone, together[:, case.part(index)])
