"""Any order of growth, rollback, sharing and preemption: each sequence reads what it computed, and no page is lost.

Every token's key is made of the tokens before it, as a model's is, so a page that is shared wrongly shows. Layers with
windows have page tables of their own, and see what their windows reach alone. A computed prefix is reused as far as
windows allow, and sequences that reuse it produce the same text.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.engine.core.jobs import Job, StepRecord
from tandem.engine.core.scheduler import PageScheduler
from tandem.engine.interface import EngineSettings
from tandem.engine.kv_cache import arena
from tandem.engine.kv_cache.arena import (
    ROLLBACK_TOKENS,
    KvArena,
    LayerGeometry,
    PageTable,
    arena_pages,
    bytes_of_page,
    group_layers,
)
from tandem.engine.kv_cache.paged_cache import PagedCache
from tandem.engine.kv_cache.sequence import Segment, Sequence
from tandem.errors import ConfigurationError, InvalidRequestError
from tandem.model.types import Delta
from tests.service.clients import until
from tests.unit.engine.conftest import MakeModel, TinyModel
from tests.unit.engine.greedy import Generation, GreedyHead, greedy, plain_greedy, running, settle

Windows = tuple[int | None, ...]
"""Of the layers."""

MAX_LENGTH = 300


def new_arena(page_count: int, windows: Windows = (None,)) -> KvArena:
    """A layer for each window."""
    layers = [LayerGeometry(1, 1, 1, window) for window in windows]
    return KvArena(layers, page_count, torch.float32, torch.device("cpu"))


def new_sequence(
    max_length: int = MAX_LENGTH, windows: Windows = (None,), scope: str = "a scope"
) -> Sequence:
    tables = [PageTable(64, max_length, window=window) for window in windows]
    return Sequence(tables, max_length, vocabulary_size=1000, scope=scope)


def keys_of(token_ids: list[int], layer: int = 0) -> list[float]:
    """A number for each token that depends on all tokens before it and on the layer, exactly a float32."""
    keys = []
    key = 1
    for token_id in token_ids:
        key = (key * 31 + token_id + 1) % 1_000_003
        keys.append(key + layer / 4)
    return keys


def compute(arena: KvArena, cache: PagedCache, sequence: Sequence, count: int) -> None:
    """Compute a step: write the next tokens' keys, then publish their pages."""
    start = sequence.computed_length
    end = sequence.computed_length + count
    for index, layer in enumerate(arena.layers):
        slots = torch.from_numpy(sequence.tables[layer.group].slots(start, end))
        keys = torch.tensor(keys_of(sequence.token_ids, index)[start:end])
        layer.keys[slots // 64, slots % 64, 0, 0] = keys
    sequence.advance(count)
    cache.after_step(sequence)


def stored(arena: KvArena, sequence: Sequence, index: int = 0) -> list[float]:
    """The keys that the next token sees in a layer."""
    layer = arena.layers[index]
    table = sequence.tables[layer.group]
    end = sequence.computed_length
    first = 0 if table.window is None else max(0, end - table.window + 1)
    assert not end or table.first <= first // 64, "the page is still its own"
    slots = torch.from_numpy(table.slots(first, end))
    found: list[float] = layer.keys[slots // 64, slots % 64, 0, 0].tolist()
    return found


_PAGES = 7
"""For each group of layers."""
_ROLLBACK = 20
_STALE = -1.0

_tokens = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from([1, 17, 40, 64, 128])), min_size=1, max_size=3
).map(lambda runs: [token_id for token_id, count in runs for _ in range(count)])
"""Of two ids in a few lengths, so that texts often begin alike for more than a page, or for a part of one."""
_windows = st.sampled_from([(None,), (None,), (None, 40), (24,), (None, 24, 100)])
_choice = st.integers(0, 1 << 16)
_share = st.one_of(st.just(1.0), st.floats(0, 1))


class PagedCaches(RuleBasedStateMachine):
    """Sequences that share one small cache."""

    seen: ClassVar[Counter[str]] = Counter()
    """Events of all runs, without which they would show little."""

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
        sequence.apply(Delta(0, token_ids[:MAX_LENGTH]))

    @precondition(lambda self: self.sequences)
    @rule(choice=_choice, token_ids=_tokens)
    def open_alike(self, choice: int, token_ids: list[int]) -> None:
        """Begin as another sequence does that has been computed."""
        self.step(choice, 1.0, 0)
        self.open([*self._pick(choice).token_ids, *token_ids])
        self.step(len(self.sequences) - 1, 1.0, 0)

    @precondition(lambda self: self.sequences)
    @rule(choice=_choice, token_ids=_tokens, keep=_share)
    def change(self, choice: int, token_ids: list[int], keep: float) -> None:
        """Roll back to anywhere and go on with other tokens."""
        sequence = self._pick(choice)
        token_ids = token_ids[:MAX_LENGTH]
        base_length = min(round(keep * sequence.length), MAX_LENGTH - len(token_ids))
        sequence.apply(Delta(base_length, token_ids))

    @precondition(lambda self: self.sequences)
    @rule(choice=_choice, share=_share, rows=st.integers(0, 80))
    def step(self, choice: int, share: float, rows: int) -> None:
        sequence = self._pick(choice)
        sequence.want_rows(min(rows, sequence.length))
        before = sequence.computed_length
        self.cache.reuse(sequence, min(rows, sequence.length))
        self.seen["reused"] += sequence.computed_length > before
        assert sequence.pending_count >= min(rows, sequence.length)
        count = max(1, round(share * sequence.pending_count))
        if not sequence.pending_count:
            return
        is_ready = self.cache.make_ready(sequence, sequence.computed_length + count)
        self.seen["computed" if is_ready else "found no page"] += 1
        if is_ready:
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
            if self.cache.lacks_seen_pages(sequence):
                assert sequence.computed_length == 0, "it begins again"
                continue
            for index in range(len(self.arena.layers)):
                found = stored(self.arena, sequence, index)
                end = sequence.computed_length
                assert found == keys_of(sequence.token_ids, index)[end - len(found) : end]

    @invariant()
    def no_page_is_lost_or_given_twice(self) -> None:
        if not hasattr(self, "cache"):
            return
        pool = self.cache._pool
        groups = self.arena.group_count
        held = [page for sequence in self.sequences for table in sequence.tables for page in table.held_pages]
        self.seen["shared"] += len(held) > len(set(held))
        pages = range(self.arena.page_count)
        assert [pool.holders(page) for page in pages] == [held.count(page) for page in pages]
        assert pool.available_count == len(pages) - len(set(held))
        assert self.cache.usage().reserved_tokens == 64 * len(set(held)) // groups

    def _pick(self, choice: int) -> Sequence:
        return self.sequences[choice % len(self.sequences)]


def test_paged_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "ROLLBACK_TOKENS", _ROLLBACK)  # so that windows move within a few pages
    PagedCaches.seen.clear()
    case = PagedCaches.TestCase
    case.settings = settings(max_examples=100, stateful_step_count=40)
    case().runTest()
    assert {*PagedCaches.seen} == {"reused", "computed", "found no page", "shared"}, PagedCaches.seen
    assert min(PagedCaches.seen.values()) > 0, PagedCaches.seen


def test_the_same_computed_twice_at_once_is_kept_once() -> None:
    cache = PagedCache(new_arena(8))
    both = [new_sequence(), new_sequence()]
    for sequence in both:
        sequence.apply(Delta(0, [5] * 130))
        assert cache.make_ready(sequence, 130)
    for sequence in both:
        sequence.advance(130)
        cache.after_step(sequence)
    first, second = (sequence.table.pages for sequence in both)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert cache.usage().reserved_tokens == 4 * 64


def test_nobody_begins_with_the_last_pages_of_those_who_were_first() -> None:
    cache = PagedCache(new_arena(200))
    first = new_sequence(20_000)
    second = new_sequence(20_000)
    first.apply(Delta(0, [3] * 64 * 190))
    assert cache.make_ready(first, first.length)
    second.apply(Delta(0, [4] * 64 * 9))
    assert not cache.make_ready(second, 64), "one page in a hundred stays free"
    second.apply(Delta(0, [4] * 64 * 8))
    assert cache.make_ready(second, 64)


_PREFIX = [(11 * step) % 90 + 3 for step in range(100)]


class _Counting:
    """Counts the tokens that the model sees."""

    token_count = 0

    def __call__(self, record: StepRecord) -> None:
        self.token_count += record.token_count

    def take(self) -> int:
        """The count since the last call."""
        count = self.token_count
        self.token_count = 0
        return count


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "deepseek_v3", "falcon"])
async def test_a_reused_prefix_is_not_computed_again(family: str, tiny_model: MakeModel) -> None:
    model = tiny_model(family)
    count = _Counting()
    costs = []
    async with running(model.loaded, GreedyHead(), on_step=count) as engine:
        for prompt in ([*_PREFIX, 50], [*_PREFIX, 51], [*_PREFIX[:60], 52], [*_PREFIX, 50]):
            assert await greedy(engine, prompt, 8) == plain_greedy(model.reference, prompt, 8)
            await settle(engine)
            costs.append(count.take())
    assert costs == [101 + 7, 1 + 7, 1 + 7, 1 + 7]


@pytest.mark.parametrize("length", [40, 101], ids=["less than a page", "more than a page"])
async def test_a_prefix_is_computed_anew_for_another_scope(length: int, llama: TinyModel) -> None:
    """Even while the sequence that computed it is still open."""
    count = _Counting()
    costs = []
    prompt = [*_PREFIX, 50][:length]
    async with running(llama.loaded, GreedyHead(), on_step=count) as engine:
        first = await engine.open(length, scope="first")
        await engine.submit(Job(first, Delta(0, prompt), 1, Generation(1)))
        count.take()
        for scope in ("second", "second", "first", "", ""):
            assert await greedy(engine, prompt, 1, scope) == plain_greedy(llama.reference, prompt, 1)
            await until(lambda: engine.usage.sequence_count == 1, 5.0)
            costs.append(count.take())
        engine.release(first)
    assert costs == [length, 1, 1, length, length]


async def test_kept_prefixes_make_room_least_recently_used_first(llama: TinyModel) -> None:
    count = _Counting()
    costs = []
    room = 2 * 128 * 4 * sum(layer.values_per_token for layer in llama.loaded.layers)
    first, second, third = ([id_] * 80 for id_ in (5, 6, 7))
    async with running(
        llama.loaded, GreedyHead(), on_step=count, max_length=128, kv_cache_bytes=room
    ) as engine:
        for prompt in (first, second, first, third, first, second):
            assert await greedy(engine, prompt, 1) == plain_greedy(llama.reference, prompt, 1)
            await settle(engine)
            assert engine.usage.retained_tokens <= 256
            costs.append(count.take())
    assert costs == [80, 80, 1, 80, 1, 80], "the third took the second's place, not the first's"


META = torch.device("meta")
LAYERS = [LayerGeometry(8, 128, 128)] * 32
LONGEST = 131_072
BYTES = 60 * 10**9


@pytest.mark.parametrize("reuses_prefixes", [True, False])
def test_a_sequence_that_rolls_back_behind_its_windows_computes_again(reuses_prefixes: bool) -> None:
    windows: Windows = (None, 60)
    arena = new_arena(24, windows)
    cache = PagedCache(arena, reuses_prefixes=reuses_prefixes)
    sequence = new_sequence(1024, windows)
    sequence.apply(Delta(0, [5] * 600))
    assert cache.make_ready(sequence, 600)
    compute(arena, cache, sequence, 600)
    first = sequence.tables[1].first
    assert first == (600 - 136 - 59) // 64
    sequence.apply(Delta(600 - 136, [6]))
    assert sequence.computed_length == 600 - 136, "so far it may"
    sequence.apply(Delta(first * 64 + 58, [6]))
    assert sequence.computed_length == 0
    assert not cache.is_ready(sequence, 1)
    assert cache.make_ready(sequence, sequence.length)
    compute(arena, cache, sequence, sequence.pending_count)
    assert stored(arena, sequence, 1) == keys_of([5] * (first * 64 + 58) + [6], 1)[-59:]


def test_rows_that_can_never_be_computed_at_once_are_refused() -> None:
    windows: Windows = (60,)
    cache = PagedCache(new_arena(8, windows))
    sequence = new_sequence(2048, windows)
    sequence.apply(Delta(0, [5] * 1000))
    cache.check_rows(sequence, 200)
    with pytest.raises(InvalidRequestError, match="take 11 pages at once, but the KV cache has 8"):
        cache.check_rows(sequence, 400)


def test_a_hundred_chats_without_a_limit_run() -> None:
    """Reserved at once, the whole length of three would fill the memory."""
    limits = EngineSettings(max_sequences=128, kv_cache_bytes=BYTES)
    arena = KvArena(LAYERS, arena_pages(LAYERS, limits, LONGEST, torch.bfloat16, META), torch.bfloat16, META)
    cache = PagedCache(arena)
    scheduler = PageScheduler(cache, lambda _: None)
    assert cache.usage().total_tokens // LONGEST == 3
    chats = [Sequence((PageTable(64, LONGEST),), LONGEST, vocabulary_size=128_256) for _ in range(100)]
    for length in range(0, 4000, 50):
        for number, chat in enumerate(chats):
            chat.apply(Delta(length, [number] * 50))
        ready = scheduler.with_pages([Segment(chat, 50) for chat in chats])
        assert len(ready) == len(chats)
        for chat in chats:
            chat.advance(50)
            cache.after_step(chat)
    assert cache.preemption_count == 0
    assert cache.usage().used_tokens == 100 * 4000
    assert cache.usage().reserved_tokens == 100 * 4032


def test_nobody_takes_over_what_a_distrusted_sequence_computed_before_its_window() -> None:
    windows: Windows = (60,)
    cache = PagedCache(new_arena(24, windows))
    first, second, third = (new_sequence(1024, windows) for _ in range(3))
    for sequence in (first, second, third):
        sequence.apply(Delta(0, [5] * 600))
    assert cache.make_ready(first, 600)
    first.advance(600)
    cache.after_step(first)
    cache.reuse(second)
    assert second.computed_length == 600
    cache.release(second)
    cache.distrust(first)
    cache.reuse(third)
    assert third.computed_length == 0


SHAPES = {
    "Gemma-2-9B": [LayerGeometry(8, 256, 256, None if index % 2 else 4096) for index in range(42)],
    "Gemma-3-27B": [LayerGeometry(16, 128, 128, 1024 if (index + 1) % 6 else None) for index in range(62)],
    "GPT-OSS-120B": [LayerGeometry(8, 64, 64, None if index % 2 else 128) for index in range(36)],
}
TOKENS = 32_768
PAGE = 64
PLENTY = 1 << 40
"""Bytes. Whatever memory the machine has free is not looked at."""


@pytest.mark.parametrize("layers", SHAPES.values(), ids=SHAPES.keys())
def test_a_long_request_takes_its_tokens_in_full_layers_and_its_windows_in_the_others(
    layers: list[LayerGeometry],
) -> None:
    """Only the accounting is real, the arena is not. A smaller one is refused."""
    settings = EngineSettings(max_sequences=1, prefill_chunk_tokens=2048, kv_cache_bytes=PLENTY)
    least = arena_pages(layers, settings, TOKENS, torch.bfloat16, META)
    room = least * bytes_of_page(layers, torch.bfloat16)
    with pytest.raises(ConfigurationError, match=f"needs {room};"):
        arena_pages(layers, replace(settings, kv_cache_bytes=room - 1), TOKENS, torch.bfloat16, META)
    arena = KvArena(layers, least, torch.bfloat16, META)
    cache = PagedCache(arena, reuses_prefixes=False)
    tables = [PageTable(PAGE, TOKENS, window=window) for window in arena.windows]
    sequence = Sequence(tables, TOKENS, 10)
    sequence.apply(Delta(0, [5] * TOKENS))
    while sequence.pending_count:
        assert cache.make_ready(sequence, sequence.computed_length + 2048), "the longest request fits alone"
        sequence.advance(2048)
        cache.after_step(sequence)
    page_bytes = bytes_of_page(layers, torch.bfloat16)
    held = page_bytes * sum(len(table.held_pages) for table in tables)
    (window,) = {layer.window for layer in layers} - {None}
    assert window is not None
    full = sum(layer.window is None for layer in layers)
    kept = TOKENS - (TOKENS - window + 1 - ROLLBACK_TOKENS) // PAGE * PAGE
    assert window + ROLLBACK_TOKENS - 1 <= kept < window + ROLLBACK_TOKENS + PAGE
    token = layers[0].values_per_token * 2
    padding = full * len(arena.windows) - len(layers)  # of a last group with fewer layers
    assert held == token * (full * TOKENS + (len(layers) - full + padding) * kept)
    assert held < 0.68 * token * len(layers) * TOKENS, "than if all layers kept all tokens"


def _windows_of(*windows: int | None, heads: int = 2) -> list[LayerGeometry]:
    return [LayerGeometry(heads, 8, 8, window) for window in windows]


@pytest.mark.parametrize(
    ("layers", "groups"),
    [
        (_windows_of(None, None, None), [(None, (0, 1, 2))]),
        (_windows_of(16, 16), [(16, (0, 1))]),
        (_windows_of(16, None, 16, None), [(None, (1, 3)), (16, (0, 2))]),
        (_windows_of(16, 16, 16, None, 16), [(None, (3,)), (16, (0,)), (16, (1,)), (16, (2,)), (16, (4,))]),
        (_windows_of(16, 16, 16, None, None), [(None, (3, 4)), (16, (0, 1)), (16, (2,))]),
        # Of different shapes no page serves both.
        (_windows_of(16, None) + _windows_of(16, heads=4), [(None, (0, 1, 2))]),
        (_windows_of(*[16] * 31, None)[:8] + _windows_of(*[16] * 23, None), None),
    ],
)
def test_groups_have_as_many_layers_as_the_rarest_window(
    layers: list[LayerGeometry], groups: list[tuple[int | None, tuple[int, ...]]] | None
) -> None:
    found = group_layers(layers)
    assert sorted(index for group in found for index in group.layers) == list(range(len(layers)))
    if groups is None:
        assert len(found) <= 9, "a table for each of many small groups would cost more than it saves"
    else:
        assert [(group.window, group.layers) for group in found] == groups
