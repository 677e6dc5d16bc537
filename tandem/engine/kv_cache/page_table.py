"""Where the tokens of a sequence lie: the page of each run of positions.

A page table is what vLLM calls a block table (Kwon et al. 2023, arXiv 2309.06180, section 4.2).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def pages_for(tokens: int, page_tokens: int) -> int:
    """Number of pages that hold `tokens` tokens."""
    return -(-tokens // page_tokens)


class PageTable:
    """The pages of one sequence, first positions first.

    The numbers stay at one address for as long as the table lives, so that a kernel is told the address alone.
    """

    __slots__ = ("_count", "_numbers", "address", "page_tokens")

    def __init__(self, page_tokens: int, max_tokens: int, pages: Iterable[int] = ()) -> None:
        """
        Args:
            page_tokens: tokens of a page.
            max_tokens: the most that the table has to have room for.
            pages: what it begins with.
        """
        self.page_tokens = page_tokens
        self._numbers = np.zeros(pages_for(max_tokens, page_tokens), dtype=np.int64)
        self.address: int = self._numbers.ctypes.data
        """Address of the numbers, int64."""
        self._count = 0
        self.extend(pages)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._count:
            raise IndexError(f"page {index} of {self._count}")
        return int(self._numbers[index])

    @property
    def capacity(self) -> int:
        """Tokens that the pages hold."""
        return self._count * self.page_tokens

    @property
    def max_pages(self) -> int:
        """Pages that the table has room for."""
        return len(self._numbers)

    @property
    def pages(self) -> list[int]:
        """The pages in order."""
        pages: list[int] = self._numbers[: self._count].tolist()
        return pages

    def extend(self, pages: Iterable[int]) -> None:
        """Adds pages behind the last one."""
        for page in pages:
            self._numbers[self._count] = page
            self._count += 1

    def replace(self, index: int, page: int) -> None:
        """Puts a page in place of another."""
        self._numbers[index] = page

    def shorten(self, count: int) -> list[int]:
        """Keeps the first `count` pages and returns the others, last first."""
        removed: list[int] = self._numbers[count : self._count][::-1].tolist()
        self._count = min(self._count, count)
        return removed

    def slots(self, start: int, end: int) -> np.ndarray:
        """Where the positions from `start` up to `end` lie: page times `page_tokens` plus offset, int64."""
        positions = np.arange(start, end)
        pages, offsets = np.divmod(positions, self.page_tokens)
        return self._numbers[pages] * self.page_tokens + offsets
