"""Extents never overlap, and freed memory can be allocated again."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.kv_cache.extents import GRANULE_TOKENS, Extent, ExtentPool


def test_extents_are_whole_granules_lowest_first() -> None:
    pool = ExtentPool(5 * GRANULE_TOKENS + 1)
    assert pool.total_tokens == 5 * GRANULE_TOKENS
    first, second = pool.allocate(1), pool.allocate(GRANULE_TOKENS + 1)
    assert first == Extent(0, GRANULE_TOKENS)
    assert second == Extent(GRANULE_TOKENS, 2 * GRANULE_TOKENS)
    assert pool.reserved_tokens == 3 * GRANULE_TOKENS
    assert pool.allocate(3 * GRANULE_TOKENS) is None
    pool.free(first)
    assert pool.allocate(GRANULE_TOKENS) == first


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5 * GRANULE_TOKENS)), max_size=60))
def test_no_two_extents_share_a_token_and_none_is_lost(steps: list[tuple[bool, int]]) -> None:
    pool = ExtentPool(12 * GRANULE_TOKENS)
    held: list[Extent] = []
    for frees, size in steps:
        if frees and held:
            pool.free(held.pop(size % len(held)))
        elif (extent := pool.allocate(size)) is not None:
            assert extent.capacity >= size
            held.append(extent)
        held_tokens = {token for extent in held for token in range(extent.start, extent.end)}
        assert len(held_tokens) == sum(extent.capacity for extent in held) == pool.reserved_tokens
        assert max(held_tokens, default=0) < pool.total_tokens
    for extent in held:
        pool.free(extent)
    assert pool.allocate(pool.total_tokens) == Extent(0, pool.total_tokens)
