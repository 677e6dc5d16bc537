"""Prefixes that some sequence has computed and another may take over, found page by page.

A full page is known by its tokens and by everything before them, which a number stands for (its *chain*): the key of a
page is the chain of the page before it and its own tokens. The table compares the tokens themselves, so no two
prefixes are ever mistaken for each other. As in vLLM's automatic prefix caching, but with tokens in place of hashes.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import count

MIN_COPIED_TOKENS = 16
"""Fewer tokens of a page are computed: a copy costs two calls a layer, however short."""

ROOT = 0
"""The chain of no tokens."""

_MAX_COMPARED = 64
"""Pages that begin alike and are compared for the longest match."""

_Key = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class KnownPage:
    """A page whose keys and values are computed."""

    page: int
    parent: int
    """Chain of everything before the page."""
    chain: int
    """Chain of everything up to its end, if it is full."""
    token_ids: tuple[int, ...]


class PrefixIndex:
    """The known pages, by what is in them and before them. Holds nothing: `PagePool` says who does."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._chains = count(ROOT + 1)
        self._by_page: dict[int, KnownPage] = {}
        self._full: dict[_Key, KnownPage] = {}
        self._alike: dict[_Key, dict[int, KnownPage]] = {}
        """By chain before them and by their first tokens, the latest last."""

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def __len__(self) -> int:
        return len(self._by_page)

    def full_page(self, parent: int, token_ids: SequenceOf[int]) -> KnownPage | None:
        """The page that holds exactly these tokens, `page_tokens` many, after the chain `parent`."""
        return self._full.get((parent, tuple(token_ids)))

    def longest_beginning(self, parent: int, token_ids: SequenceOf[int]) -> tuple[KnownPage, int] | None:
        """The page that begins with most of these tokens, after the chain `parent`, and how many; None for too few."""
        alike = self._alike.get((parent, tuple(token_ids[:MIN_COPIED_TOKENS])))
        if not alike or len(token_ids) < MIN_COPIED_TOKENS:
            return None
        latest = list(alike.values())[-_MAX_COMPARED:]
        best = max(latest, key=lambda known: common_length(known.token_ids, token_ids))
        return best, common_length(best.token_ids, token_ids)

    def enter(self, page: int, parent: int, token_ids: SequenceOf[int]) -> KnownPage:
        """Makes a page known. A full one must not be known under another number."""
        known = KnownPage(page, parent, next(self._chains), tuple(token_ids))
        self.forget(page)
        self._by_page[page] = known
        if len(known.token_ids) == self._page_tokens:
            self._full[parent, known.token_ids] = known
        if len(known.token_ids) >= MIN_COPIED_TOKENS:
            key = parent, known.token_ids[:MIN_COPIED_TOKENS]
            self._alike.setdefault(key, {})[page] = known
        return known

    def forget(self, page: int) -> None:
        """A page is going to hold something else."""
        known = self._by_page.pop(page, None)
        if known is None:
            return
        self._full.pop((known.parent, known.token_ids), None)
        key = known.parent, known.token_ids[:MIN_COPIED_TOKENS]
        if alike := self._alike.get(key):
            alike.pop(page, None)
            if not alike:
                del self._alike[key]


def common_length(known: SequenceOf[int], wanted: SequenceOf[int]) -> int:
    """Number of tokens at the start that are equal."""
    limit = min(len(known), len(wanted))
    return next((index for index in range(limit) if known[index] != wanted[index]), limit)
