"""Writing a step's keys and values to pages of the arena, and reading those of sequences from them."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from tandem.engine.kv_cache.arena import LayerCache, PageTable, pages_for

Span = tuple[PageTable, int, int]
"""The positions of a sequence from the first number up to the second."""

_MIN_RUN_TOKENS = 32
"""On a CPU, longer runs of tokens in one page are copied run by run, shorter ones by one scattered copy. Measured for a
prompt of 512 tokens: 98 us by runs and 158 scattered; for 16 times 5 tokens: 218 and 44."""


class PageWriter:
    """Writes the tokens of a step to their places, in every layer of a group."""

    def __init__(self, pages: Tensor, offsets: Tensor, runs: SequenceOf[tuple[int, int, int]] = ()) -> None:
        """
        Args:
            pages: int64 [tokens], the page of each token.
            offsets: int64 [tokens], its place there.
            runs: instead of both, page, first and last place of consecutive tokens in one page.
        """
        self._pages, self._offsets, self._runs = pages, offsets, runs

    @classmethod
    def of_spans(cls, spans: SequenceOf[Span], device: torch.device) -> PageWriter:
        """The writer of the tokens of sequences at these positions."""
        page_tokens = spans[0][0].page_tokens
        if device.type == "cpu" and (runs := _long_runs(spans)):
            return cls(torch.empty(0), torch.empty(0), runs)
        slots = torch.from_numpy(np.concatenate([table.slots(start, end) for table, start, end in spans]))
        # One copy to the device for both.
        return cls(*torch.stack((slots // page_tokens, slots % page_tokens)).to(device))

    def write(self, layer: LayerCache, key: Tensor, value: Tensor) -> None:
        """Stores keys and values, [1, kv_heads, tokens, dim] with the tokens of the spans in order."""
        for storage, states in ((layer.keys, key), (layer.values, value)):
            by_token = states[0].transpose(0, 1)
            if not self._runs:
                storage[self._pages, self._offsets] = by_token
                continue
            first = 0
            for page, start, end in self._runs:
                storage[page, start:end] = by_token[first : first + end - start]
                first += end - start


class PageReader:
    """Reads the pages of sequences in order, the same ones in every layer."""

    def __init__(self, pages: Tensor) -> None:
        self._pages = pages
        self._rows: dict[int, Tensor] = {}

    @classmethod
    def of_tables(
        cls, tables: SequenceOf[PageTable], start: int, end: int, device: torch.device
    ) -> PageReader:
        """The reader of all pages that hold positions from `start` up to `end`.

        A sequence that ends earlier is read on in its last page, whose numbers are its own or hidden anyway.
        """
        size = tables[0].page_tokens
        first, count = start // size, pages_for(end, size)
        lists = [table.pages[first:count] or table.pages[-1:] for table in tables]
        padded = [pages + pages[-1:] * (count - first - len(pages)) for pages in lists]
        return cls(torch.tensor(padded, device=device))

    def read(self, storage: Tensor) -> Tensor:
        """A copy of keys or values, [sequences, kv_heads, pages * page_tokens, dim]."""
        _, page_tokens, heads, dim = storage.shape
        sequences, count = self._pages.shape
        by_head = storage.transpose(1, 2)
        if not by_head.is_contiguous():
            found = storage.index_select(0, self._pages.flatten())
            return found.view(sequences, count * page_tokens, heads, dim).transpose(1, 2)
        # One head's numbers in one page are one row, so that a single copy puts them in order.
        rows = by_head.view(-1, page_tokens * dim).index_select(0, self._rows_of(heads))
        return rows.view(sequences, heads, count * page_tokens, dim)

    def _rows_of(self, heads: int) -> Tensor:
        found = self._rows.get(heads)
        if found is None:
            numbers = torch.arange(heads, device=self._pages.device)
            rows = self._pages[:, None] * heads + numbers[None, :, None]
            found = self._rows[heads] = rows.flatten()
        return found


def _long_runs(spans: SequenceOf[Span]) -> list[tuple[int, int, int]]:
    """Page, first and last offset of each run of tokens in one page; none where the runs are short."""
    token_count = sum(end - start for _, start, end in spans)
    if token_count < _MIN_RUN_TOKENS * len(spans):
        return []
    runs = []
    for table, start, end in spans:
        size = table.page_tokens
        for index in range(start // size, pages_for(end, size)):
            first = index * size
            runs.append((table[index], max(start - first, 0), min(end - first, size)))
    return runs if token_count >= _MIN_RUN_TOKENS * len(runs) else []
