"""Any order of growth, rollback, sharing and preemption: each sequence reads what it computed, and no page is lost.

Every token's key is made of the tokens before it, as a model's is, so a page that is shared wrongly shows. Layers with
windows have page tables of their own, and see what their windows reach alone.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.engine.kv_cache import arena
from tandem.engine.kv_cache.paged_cache import PagedCache
from tandem.engine.kv_cache.sequence import Sequence
from tandem.types import Delta
from tests.unit.engine.kv_cache.keys import (
    MAX_LENGTH,
    Windows,
    compute,
    keys_of,
    new_arena,
    new_sequence,
    stored,
)

_PAGES = 7
"""For each group of layers."""
_ROLLBACK = 20
_STALE = -1.0

_tokens = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from([1, 17, 40, 64])), min_size=1, max_size=3
).map(lambda runs: [token_id for token_id, count in runs for _ in range(count)])
"""Of two ids in a few lengths, so that texts often begin alike for more than a page, or for a part of one."""
_windows = st.sampled_from([(None,), (None,), (None, 40), (24,), (None, 24, 100)])
_choice = st.integers(0, 1 << 16)
_share = st.floats(0, 1)


class PagedCaches(RuleBasedStateMachine):
    """Sequences that share one small cache."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences: list[Sequence] = []

    @initialize(reuses_prefixes=st.booleans(), windows=_windows)
    def start(self, reuses_prefixes: bool, windows: Windows) -> None:
        self.arena = new_arena(_PAGES * len(windows), windows)
        self.arena.layers[0].keys.fill_(_STALE)
        self.cache = PagedCache(self.arena, reuses_prefixes=reuses_prefixes)

    @rule(token_ids=_tokens)
    def open(self, token_ids: list[int]) -> None:
        sequence = new_sequence(windows=self.arena.windows)
        self.sequences.append(sequence)
        sequence.apply(Delta(0, token_ids))

    @precondition(lambda self: self.sequences)
    @rule(choice=_choice, token_ids=_tokens, keep=_share)
    def change(self, choice: int, token_ids: list[int], keep: float) -> None:
        """Roll back to anywhere and go on with other tokens."""
        sequence = self._pick(choice)
        base_length = min(round(keep * sequence.length), MAX_LENGTH - len(token_ids))
        sequence.apply(Delta(base_length, token_ids))

    @precondition(lambda self: self.sequences)
    @rule(choice=_choice, share=_share, rows=st.integers(0, 80))
    def step(self, choice: int, share: float, rows: int) -> None:
        sequence = self._pick(choice)
        sequence.want_rows(min(rows, sequence.length))
        self.cache.reuse(sequence, min(rows, sequence.length))
        assert sequence.pending_count >= min(rows, sequence.length)
        count = max(1, round(share * sequence.pending_count))
        if sequence.pending_count and self.cache.make_ready(sequence, sequence.computed_length + count):
            compute(self.arena, self.cache, sequence, count)
            for table in sequence.tables:
                reach = math.inf if table.window is None else table.window - 1 + _ROLLBACK
                assert 64 * (table.first + 1) > sequence.computed_length - reach, "it keeps no more than that"

    @precondition(lambda self: self.sequences)
    @rule(choice=_choice, tokens=st.integers(0, 100))
    def branch(self, choice: int, tokens: int) -> None:
        """Write behind the end, as branches do."""
        sequence = self._pick(choice)
        if sequence.pending_count or not self.cache.is_ready(sequence, sequence.length):
            return
        self.cache.take_spare(sequence, tokens)
        for layer in self.arena.layers:
            table = sequence.tables[layer.group]
            for position in range(sequence.length, table.capacity):
                layer.keys[table[position // 64], position % 64] = _STALE

    @precondition(lambda self: self.sequences)
    @rule(choice=_choice, how=st.sampled_from(["preempt", "distrust", "trim"]))
    def take_back(self, choice: int, how: str) -> None:
        getattr(self.cache, how)(self._pick(choice))

    @precondition(lambda self: self.sequences)
    @rule(choice=_choice)
    def release(self, choice: int) -> None:
        self.cache.release(self.sequences.pop(choice % len(self.sequences)))

    @invariant()
    def each_reads_what_it_computed(self) -> None:
        for sequence in self.sequences:
            if self.cache._lacks_seen_pages(sequence):
                assert sequence.computed_length == 0, "it begins again"
                continue
            for index in range(len(self.arena.layers)):
                found, end = stored(self.arena, sequence, index), sequence.computed_length
                assert found == keys_of(sequence.token_ids, index)[end - len(found) : end]

    @invariant()
    def no_page_is_lost_or_given_twice(self) -> None:
        if not hasattr(self, "cache"):
            return
        pool, groups = self.cache._pool, self.arena.group_count
        held = [page for sequence in self.sequences for table in sequence.tables for page in table.held_pages]
        pages = range(self.arena.page_count)
        assert [pool.holders(page) for page in pages] == [held.count(page) for page in pages]
        assert pool.available_count == len(pages) - len(set(held))
        assert self.cache.usage().reserved_tokens == 64 * len(set(held)) // groups

    def _pick(self, choice: int) -> Sequence:
        return self.sequences[choice % len(self.sequences)]


def test_paged_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "ROLLBACK_TOKENS", _ROLLBACK)  # so that windows move within a few pages
    case = PagedCaches.TestCase
    case.settings = settings(max_examples=100, stateful_step_count=40)
    case().runTest()


def test_the_same_computed_twice_at_once_is_kept_once() -> None:
    cache = PagedCache(new_arena(8))
    both = [new_sequence(), new_sequence()]
    for sequence in both:
        sequence.apply(Delta(0, [5] * 130))
        assert cache.make_ready(sequence, 130)
    for sequence in both:
        sequence.advance(130)
        cache.computed(sequence)
    first, second = (sequence.table.pages for sequence in both)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert cache.usage().reserved_tokens == 4 * 64


def test_nobody_begins_with_the_last_pages_of_those_who_were_first() -> None:
    cache = PagedCache(new_arena(200))
    first, second = new_sequence(20_000), new_sequence(20_000)
    first.apply(Delta(0, [3] * 64 * 190))
    assert cache.make_ready(first, first.length)
    second.apply(Delta(0, [4] * 64 * 9))
    assert not cache.make_ready(second, 64), "one page in a hundred stays free"
    second.apply(Delta(0, [4] * 64 * 8))
    assert cache.make_ready(second, 64)
