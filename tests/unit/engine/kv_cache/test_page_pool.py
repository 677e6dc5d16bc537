"""Pages are counted right: none is lost, none is given twice, and kept ones are taken oldest first."""

from __future__ import annotations

import pytest

from tandem.engine.kv_cache.arena import PagePool, PageTable, pages_for


def test_unused_pages_come_first_and_kept_ones_oldest_first() -> None:
    forgotten: list[int] = []
    pool = PagePool(3, forgotten.append)
    pages = [pool.take() for _ in range(3)]
    assert pages == [0, 1, 2]
    assert pool.take() is None
    pool.let_go(1, keep=True)
    pool.let_go(0, keep=True)
    pool.let_go(2, keep=False)
    assert (pool.available_count, pool.kept_count) == (3, 2)
    assert [pool.take() for _ in range(3)] == [2, 1, 0]
    assert forgotten == [1, 0]


def test_a_use_of_a_kept_page_makes_it_the_last_to_be_taken() -> None:
    pool = PagePool(2)
    for page in (pool.take(), pool.take()):
        assert page is not None
        pool.let_go(page, keep=True)
    pool.touch(0)
    assert pool.take() == 1


def test_a_shared_page_is_free_when_the_last_holder_lets_it_go() -> None:
    pool = PagePool(1)
    page = pool.take()
    assert page == 0
    pool.share(page)
    pool.let_go(page, keep=True)
    assert (pool.holders(page), pool.available_count) == (1, 0)
    pool.let_go(page, keep=True)
    pool.share(page)  # a kept page is taken up again
    assert (pool.holders(page), pool.kept_count) == (1, 0)
    pool.let_go(page, keep=False)
    with pytest.raises(ValueError, match="page 0 is held by nobody"):
        pool.let_go(page, keep=False)


def test_a_table_gives_the_slot_of_each_position() -> None:
    table = PageTable(4, 10, (7, 2))
    assert (table.capacity, table.max_pages, len(table)) == (8, 3, 2)
    assert table.slots(2, 7).tolist() == [30, 31, 8, 9, 10]
    table.replace(0, 1)
    assert table.pages == [1, 2]
    assert table.shorten(1) == [2]
    assert table.shorten(3) == []
    with pytest.raises(IndexError, match="page 1 of 0 to 1"):
        table[1]
    assert [pages_for(tokens, 4) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]
