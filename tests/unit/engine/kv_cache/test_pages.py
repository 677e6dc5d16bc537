"""Keys and values are written to the pages of their sequences, and read back in order."""

from __future__ import annotations

import pytest
import torch

from tandem.engine.kv_cache.arena import LayerCache, PagePool, PageTable, pages_for
from tandem.engine.kv_cache.pages import PageReader, PageWriter

PAGE_TOKENS = 64
CPU = torch.device("cpu")
SPANS = {
    "one token": [([5, 2], 69, 70)],
    "one token each": [([5, 2], 69, 70), ([1, 6, 3], 0, 1)],
    "across a page's end": [([5, 2], 62, 67)],
    "one page": [([5, 2], 3, 64)],
    "several pages": [([7, 0, 4, 1], 45, 250)],
    "prompts": [([7, 0, 4, 1], 45, 250), ([2, 6, 3], 0, 160)],
}


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS.keys())
@pytest.mark.parametrize("by_head", [True, False])
def test_what_is_written_is_read_back(by_head: bool, spans: list[tuple[list[int], int, int]]) -> None:
    def storage(dim: int) -> torch.Tensor:
        if by_head:
            return torch.zeros(8, 2, PAGE_TOKENS, dim).transpose(1, 2)
        return torch.zeros(8, PAGE_TOKENS, 2, dim)

    layer = LayerCache(storage(4), storage(6))
    tables = [PageTable(PAGE_TOKENS, 256, pages) for pages, _, _ in spans]
    count = sum(end - start for _, start, end in spans)
    key, value = torch.randn(1, 2, count, 4), torch.randn(1, 2, count, 6)
    places = [(table, start, end) for table, (_, start, end) in zip(tables, spans, strict=True)]
    PageWriter.of_spans(places, CPU).write(layer, key, value)
    first = 0
    for table, start, end in places:
        reader = PageReader.of_tables([table], 0, end, CPU)
        own = slice(first, first + end - start)
        for stored, states in ((layer.keys, key), (layer.values, value)):
            assert torch.equal(reader.read(stored)[0, :, start:end], states[0, :, own])
        first = own.stop
    assert layer.keys.count_nonzero() == key.numel(), "nothing else was written"


def test_only_the_pages_of_a_span_are_read() -> None:
    layer = torch.arange(8.0)[:, None, None, None].expand(8, PAGE_TOKENS, 1, 1)
    tables = [PageTable(PAGE_TOKENS, 256, pages) for pages in ([7, 0, 4, 1], [2, 6])]
    found = PageReader.of_tables(tables, 70, 256, CPU).read(layer)
    assert found.shape == (2, 1, 3 * PAGE_TOKENS, 1)
    numbers = found[:, 0, ::PAGE_TOKENS, 0].tolist()
    assert numbers == [[0, 4, 1], [6, 6, 6]], "a shorter sequence is read on in its last page"


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
