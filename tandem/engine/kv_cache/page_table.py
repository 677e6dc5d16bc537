"""Where the tokens of a sequence lie: the page of each run of positions.

A page table is what vLLM calls a block table (Kwon et al. 2023, arXiv 2309.06180, section 4.2).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

ROLLBACK_TOKENS = 136
"""Layers with a window keep so many tokens more than the next one sees. The longest proposal that can be configured
has 128, and a few more come with it; a sequence that rolls back further is computed again."""


def pages_for(tokens: int, page_tokens: int) -> int:
    """Number of pages that hold `tokens` tokens."""
    return -(-tokens // page_tokens)


def first_seen_page(length: int, window: int | None, page_tokens: int) -> int:
    """Index of the first page that the token after `length` others sees."""
    return 0 if window is None else max(0, length - window + 1) // page_tokens


def first_kept_page(length: int, window: int | None, page_tokens: int) -> int:
    """Index of the first page that a sequence of `length` computed tokens keeps, so that it may roll back."""
    return first_seen_page(length - ROLLBACK_TOKENS, window, page_tokens)


def most_kept_pages(length: int, step_tokens: int, window: int | None, page_tokens: int) -> int:
    """The most pages that a sequence has on its way to `length` tokens, in steps of up to `step_tokens`."""
    if window is None:
        return pages_for(length, page_tokens)
    kept = window - 1 + ROLLBACK_TOKENS + step_tokens  # wherever in its page the first one lies
    return min(pages_for(length, page_tokens), pages_for(kept - 1, page_tokens) + 1)


class PageTable:
    """The pages of one sequence in one group of layers, first positions first.

    The numbers stay at one address for as long as the table lives, so that a kernel is told the address alone.
    """

    __slots__ = ("_count", "_numbers", "address", "first", "page_tokens", "window")

    def __init__(
        self, page_tokens: int, max_tokens: int, pages: Iterable[int] = (), window: int | None = None
    ) -> None:
        """
        Args:
            page_tokens: tokens of a page.
            max_tokens: the most that the table has to have room for.
            pages: what it begins with.
            window: how many positions a token sees in these layers; None for all.
        """
        self.page_tokens = page_tokens
        self.window = window
        self._numbers = np.zeros(pages_for(max_tokens, page_tokens), dtype=np.int64)
        self.address: int = self._numbers.ctypes.data
        """Address of the numbers, int64."""
        self.first = 0
        """Index of the first page that it holds. Numbers before it are those of any pages."""
        self._count = 0
        self.extend(pages)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        if not self.first <= index < self._count:
            raise IndexError(f"page {index} of {self.first} to {self._count}")
        return int(self._numbers[index])

    @property
    def capacity(self) -> int:
        """Tokens of the sequence, from its first one on, that have a place or had one."""
        return self._count * self.page_tokens

    @property
    def max_pages(self) -> int:
        """Pages that the table has room for."""
        return len(self._numbers)

    @property
    def pages(self) -> list[int]:
        """The pages in order, with any numbers before the first that it holds."""
        pages: list[int] = self._numbers[: self._count].tolist()
        return pages

    @property
    def held_pages(self) -> list[int]:
        """The pages that it holds, in order."""
        pages: list[int] = self._numbers[self.first : self._count].tolist()
        return pages

    @property
    def shortest_length(self) -> int:
        """The fewest computed tokens after which the next one sees pages that the table holds, and no others."""
        if not self.first or self.window is None:
            return 0
        return self.first * self.page_tokens + self.window - 1

    def extend(self, pages: Iterable[int]) -> None:
        """Adds pages behind the last one."""
        for page in pages:
            self._numbers[self._count] = page
            self._count += 1

    def replace(self, index: int, page: int) -> None:
        """Puts a page in place of another."""
        self._numbers[index] = page

    def shorten(self, count: int) -> list[int]:
        """Keeps the first `count` pages and returns the others that it held, last first."""
        removed: list[int] = self._numbers[max(count, self.first) : self._count][::-1].tolist()
        self._count = min(self._count, count)
        self.first = min(self.first, count)
        return removed

    def drop_before(self, index: int) -> list[int]:
        """Keeps the pages from `index` on and returns the others that it held. There need be none from there on."""
        if index <= self.first:
            return []
        removed: list[int] = self._numbers[self.first : min(index, self._count)].tolist()
        self.first, self._count = index, max(self._count, index)
        return removed

    def slots(self, start: int, end: int) -> np.ndarray:
        """Where the positions from `start` up to `end` lie: page times `page_tokens` plus offset, int64."""
        return self.slots_of(np.arange(start, end))

    def slots_of(self, positions: np.ndarray) -> np.ndarray:
        """Where these positions lie; see `slots`."""
        pages, offsets = np.divmod(positions, self.page_tokens)
        return self._numbers[pages] * self.page_tokens + offsets
