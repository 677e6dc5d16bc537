"""Any order of growth, rollback, sharing and preemption: each sequence reads what it computed, and no page is lost.

Every token's key is made of the tokens before it, as a model's is, so a page that is shared wrongly shows.
"""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.engine.kv_cache.arena import KvArena, LayerGeometry
from tandem.engine.kv_cache.page_table import PageTable
from tandem.engine.kv_cache.paged_cache import PagedCache
from tandem.engine.kv_cache.sequence import Sequence
from tandem.types import Delta

_PAGES = 7
_MAX_LENGTH = 300
_STALE = -1.0

_tokens = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from([1, 17, 40, 64])), min_size=1, max_size=3
).map(lambda runs: [token_id for token_id, count in runs for _ in range(count)])
"""Of two ids in a few lengths, so that texts often begin alike for more than a page, or for a part of one."""
_choice = st.integers(0, 1 << 16)
_share = st.floats(0, 1)


def _arena(page_count: int) -> KvArena:
    return KvArena([LayerGeometry(1, 1, 1)], page_count, torch.float32, torch.device("cpu"))


def _new(max_length: int = _MAX_LENGTH) -> Sequence:
    return Sequence(PageTable(64, max_length), max_length, vocabulary_size=1000)


def _keys(token_ids: list[int]) -> list[float]:
    """A number for each token that depends on all tokens before it, exactly a float32."""
    keys, key = [], 1
    for token_id in token_ids:
        key = (key * 31 + token_id + 1) % 1_000_003
        keys.append(float(key))
    return keys


def _compute(arena: KvArena, cache: PagedCache, sequence: Sequence, count: int) -> None:
    """What a step does: write the next tokens' keys, then let others know of them."""
    start, end = sequence.computed_length, sequence.computed_length + count
    keys = arena.layers[0].keys
    for position, key in zip(range(start, end), _keys(sequence.token_ids)[start:end], strict=True):
        keys[sequence.table[position // 64], position % 64] = key
    sequence.advance(count)
    cache.computed(sequence)


def _stored(arena: KvArena, sequence: Sequence) -> list[float]:
    keys = arena.layers[0].keys[:, :, 0, 0]
    return [
        float(keys[sequence.table[position // 64], position % 64])
        for position in range(sequence.computed_length)
    ]


class PagedCaches(RuleBasedStateMachine):
    """Sequences that share one small cache."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences: list[Sequence] = []

    @initialize(reuses_prefixes=st.booleans())
    def start(self, reuses_prefixes: bool) -> None:
        self.arena = _arena(_PAGES)
        self.arena.layers[0].keys.fill_(_STALE)
        self.cache = PagedCache(self.arena, reuses_prefixes=reuses_prefixes)

    @rule(token_ids=_tokens)
    def open(self, token_ids: list[int]) -> None:
        sequence = _new()
        self.sequences.append(sequence)
        sequence.apply(Delta(0, token_ids))

    @precondition(lambda self: self.sequences)
    @rule(choice=_choice, token_ids=_tokens, keep=_share)
    def change(self, choice: int, token_ids: list[int], keep: float) -> None:
        """Roll back to anywhere and go on with other tokens."""
        sequence = self._pick(choice)
        base_length = min(round(keep * sequence.length), _MAX_LENGTH - len(token_ids))
        sequence.apply(Delta(base_length, token_ids))

    @precondition(lambda self: self.sequences)
    @rule(choice=_choice, share=_share)
    def step(self, choice: int, share: float) -> None:
        sequence = self._pick(choice)
        self.cache.reuse(sequence)
        count = max(1, round(share * sequence.pending_count))
        if sequence.pending_count and self.cache.make_ready(sequence, sequence.computed_length + count):
            _compute(self.arena, self.cache, sequence, count)

    @precondition(lambda self: self.sequences)
    @rule(choice=_choice, tokens=st.integers(0, 100))
    def branch(self, choice: int, tokens: int) -> None:
        """Write behind the end, as branches do."""
        sequence = self._pick(choice)
        if sequence.pending_count or not self.cache.is_ready(sequence, sequence.length):
            return
        self.cache.take_spare(sequence, sequence.length + tokens)
        for position in range(sequence.length, sequence.table.capacity):
            self.arena.layers[0].keys[sequence.table[position // 64], position % 64] = _STALE

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
            assert _stored(self.arena, sequence) == _keys(sequence.token_ids)[: sequence.computed_length]

    @invariant()
    def no_page_is_lost_or_given_twice(self) -> None:
        if not hasattr(self, "cache"):
            return
        pool = self.cache._pool
        held = [page for sequence in self.sequences for page in sequence.table.pages]
        assert [pool.holders(page) for page in range(_PAGES)] == [held.count(page) for page in range(_PAGES)]
        assert pool.available_count == _PAGES - len(set(held))
        assert self.cache.usage().reserved_tokens == 64 * len(set(held))

    def _pick(self, choice: int) -> Sequence:
        return self.sequences[choice % len(self.sequences)]


class TestPagedCaches(PagedCaches.TestCase):  # type: ignore[misc, valid-type]  # made at run time
    settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_hundred_sequences_hold_one_copy_of_a_common_prefix() -> None:
    arena = _arena(64 + 100 + 1)  # one stays free
    cache = PagedCache(arena)
    prefix = [(7 * step) % 900 for step in range(4096)]
    sequences = []
    for number in range(100):
        sequence = _new(8192)
        sequence.apply(Delta(0, [*prefix, number]))
        cache.reuse(sequence)
        assert sequence.computed_length == (4096 if number else 0)
        assert cache.make_ready(sequence, sequence.length)
        sequence.advance(sequence.pending_count)
        cache.computed(sequence)
        sequences.append(sequence)
    assert cache.usage().reserved_tokens == 4096 + 100 * 64
    assert len({tuple(sequence.table.pages[:64]) for sequence in sequences}) == 1


def test_the_same_computed_twice_at_once_is_kept_once() -> None:
    cache = PagedCache(_arena(8))
    both = [_new(), _new()]
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


def test_a_shared_page_is_copied_before_it_is_written_to() -> None:
    arena = _arena(8)
    cache = PagedCache(arena)
    first, second = _new(), _new()
    for sequence in (first, second):
        sequence.apply(Delta(0, [3] * 128))
        cache.reuse(sequence)
        assert cache.make_ready(sequence, 128)
        _compute(arena, cache, sequence, sequence.pending_count)
    assert first.table.pages == second.table.pages
    second.apply(Delta(100, [4] * 10))
    assert cache.make_ready(second, 110)
    _compute(arena, cache, second, 10)
    assert second.table[0] == first.table[0]
    assert second.table[1] != first.table[1]
    assert _stored(arena, first) == _keys([3] * 128)
    assert _stored(arena, second) == _keys([3] * 100 + [4] * 10)


def test_a_distrusted_prefix_is_found_by_nobody() -> None:
    arena = _arena(8)
    cache = PagedCache(arena)
    sick = _new()
    sick.apply(Delta(0, [3] * 128))
    assert cache.make_ready(sick, 128)
    _compute(arena, cache, sick, 128)
    cache.distrust(sick)
    other = _new()
    other.apply(Delta(0, [3] * 128))
    cache.reuse(other)
    assert other.computed_length == 0


def test_nobody_begins_with_the_last_pages_of_those_who_were_first() -> None:
    cache = PagedCache(_arena(200))
    first, second = _new(20_000), _new(20_000)
    first.apply(Delta(0, [3] * 64 * 190))
    assert cache.make_ready(first, first.length)
    second.apply(Delta(0, [4] * 64 * 9))
    assert not cache.make_ready(second, 64), "one page in a hundred stays free"
    second.apply(Delta(0, [4] * 64 * 8))
    assert cache.make_ready(second, 64)


def test_a_page_that_is_written_again_is_found_by_nobody() -> None:
    arena = _arena(8)
    cache = PagedCache(arena)
    first, second = _new(), _new()
    first.apply(Delta(0, [3] * 70))
    assert cache.make_ready(first, 70)
    _compute(arena, cache, first, 70)
    first.apply(Delta(20, [4] * 10))
    assert cache.make_ready(first, 30)
    _compute(arena, cache, first, 10)
    second.apply(Delta(0, [3] * 70))
    cache.reuse(second)
    assert second.computed_length == 20, "what they have in common"
    assert _stored(arena, second) == _keys([3] * 20)


def test_a_beginning_is_copied_only_after_the_same_tokens() -> None:
    arena = _arena(8)
    cache = PagedCache(arena)
    sequences = [_new() for _ in range(2)]
    for sequence, first in zip(sequences, (3, 4), strict=True):
        sequence.apply(Delta(0, [first] * 64 + [5] * 30))
        cache.reuse(sequence)
        assert sequence.computed_length == 0
        assert cache.make_ready(sequence, 94)
        _compute(arena, cache, sequence, 94)
    third = _new()
    third.apply(Delta(0, [4] * 64 + [5] * 40))
    cache.reuse(third)
    assert third.computed_length == 94
    assert _stored(arena, third) == _keys([4] * 64 + [5] * 30)
