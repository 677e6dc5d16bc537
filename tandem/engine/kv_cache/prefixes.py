"""Prefixes that some sequence has computed and another may take over, found block by block.

A block is the tokens of one page. A full block is known by its tokens and by everything before them, which a number
stands for (its *chain*): the key of a block is the chain of the block before it and its own tokens. The table compares
the tokens themselves, so no two prefixes are ever mistaken for each other. As in vLLM's automatic prefix caching, but
with tokens in place of hashes.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import count

MIN_COPIED_TOKENS = 16
"""Fewer tokens of a block are computed: a copy costs two calls a layer, however short."""

ROOT = 0
"""The chain of no tokens."""

NO_PAGE = -1
"""In place of a page that was lost."""

_MAX_COMPARED = 64
"""Blocks that begin alike and are compared for the longest match."""

_Key = tuple[int, tuple[int, ...]]


@dataclass(slots=True, eq=False)
class KnownBlock:
    """Tokens whose keys and values are computed."""

    pages: list[int]
    """A page for each group of layers, `NO_PAGE` where it is lost. There is at least one."""
    parent: int
    """Chain of everything before the block."""
    chain: int
    """Chain of everything up to its end, if it is full."""
    token_ids: tuple[int, ...]


class PrefixIndex:
    """The known blocks, by what is in them and before them. Holds nothing: `PagePool` says who does."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._chains = count(ROOT + 1)
        self._by_page: dict[int, KnownBlock] = {}
        self._full: dict[_Key, KnownBlock] = {}
        self._alike: dict[_Key, dict[int, KnownBlock]] = {}
        """By chain before them and by their first tokens, then by chain, the latest last."""

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def __len__(self) -> int:
        return len(self._by_page)

    def full_block(self, parent: int, token_ids: SequenceOf[int]) -> KnownBlock | None:
        """The block of exactly these tokens, `page_tokens` many, after the chain `parent`."""
        return self._full.get((parent, tuple(token_ids)))

    def longest_beginning(self, parent: int, token_ids: SequenceOf[int]) -> tuple[KnownBlock, int] | None:
        """The block without a lost page that begins with most of these tokens, after the chain `parent`, and how many;
        None for too few."""
        alike = self._alike.get((parent, tuple(token_ids[:MIN_COPIED_TOKENS])))
        if not alike or len(token_ids) < MIN_COPIED_TOKENS:
            return None
        latest = [known for known in list(alike.values())[-_MAX_COMPARED:] if NO_PAGE not in known.pages]
        if not latest:
            return None
        best = max(latest, key=lambda known: common_length(known.token_ids, token_ids))
        return best, common_length(best.token_ids, token_ids)

    def enter(self, pages: SequenceOf[int], parent: int, token_ids: SequenceOf[int]) -> KnownBlock:
        """Makes a block known, with a page for each group. A full one must not be known already."""
        known = KnownBlock([NO_PAGE] * len(pages), parent, next(self._chains), tuple(token_ids))
        for group, page in enumerate(pages):
            self.put(known, group, page)
        if len(known.token_ids) == self._page_tokens:
            self._full[parent, known.token_ids] = known
        if len(known.token_ids) >= MIN_COPIED_TOKENS:
            key = parent, known.token_ids[:MIN_COPIED_TOKENS]
            self._alike.setdefault(key, {})[known.chain] = known
        return known

    def put(self, known: KnownBlock, group: int, page: int) -> None:
        """Sets the page of a group that has none in a block."""
        self.forget(page)
        known.pages[group] = page
        self._by_page[page] = known

    def forget(self, page: int) -> None:
        """A page is going to hold something else. A block without pages is not known any more."""
        known = self._by_page.pop(page, None)
        if known is None:
            return
        known.pages[known.pages.index(page)] = NO_PAGE
        if any(other != NO_PAGE for other in known.pages):
            return
        self._full.pop((known.parent, known.token_ids), None)
        key = known.parent, known.token_ids[:MIN_COPIED_TOKENS]
        if alike := self._alike.get(key):
            alike.pop(known.chain, None)
            if not alike:
                del self._alike[key]


def common_length(known: SequenceOf[int], wanted: SequenceOf[int]) -> int:
    """Number of tokens at the start that are equal."""
    limit = min(len(known), len(wanted))
    return next((index for index in range(limit) if known[index] != wanted[index]), limit)
