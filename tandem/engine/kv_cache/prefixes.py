"""Prefixes that some sequence has computed and another may take over, found block by block.

A block is the tokens of one page. A full block is known by its tokens and by everything before them, which a number
stands for (its *chain*): the key of a block is the chain of the block before it and its own tokens. The table compares
the tokens themselves, so no two prefixes are ever mistaken for each other. As in vLLM's automatic prefix caching, but
with tokens in place of hashes.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import count

from tandem.engine.kv_cache.arena import KvArena, PagePool, first_seen_page
from tandem.engine.kv_cache.sequence import Sequence
from tandem.types import common_length

MIN_COPIED_TOKENS = 16
"""Fewer tokens of a block are computed: a copy costs two calls a layer, however short."""

ROOT = 0
"""The chain of no tokens."""

NO_PAGE = -1
"""In place of a page that was lost."""


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
        # Of many that begin alike, the latest are compared for the longest match
        latest = [known for known in list(alike.values())[-64:] if NO_PAGE not in known.pages]
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


class PrefixSharing:
    """Finds, shares and publishes the blocks of sequences."""

    def __init__(self, arena: KvArena, pool: PagePool, index: PrefixIndex) -> None:
        self._arena = arena
        self._page_tokens = arena.page_tokens
        self._pool = pool
        self._index = index
        self._unbounded = arena.windows.count(None)
        """Groups that keep all tokens. They come first."""
        self._windows = list(enumerate(arena.windows))[self._unbounded :]
        """Number and window of the others."""

    def share_blocks(self, sequence: Sequence, end: int) -> None:
        """Gives a sequence the known blocks that follow its chains and end at `end` at the latest."""
        own_count = len(sequence.chains)
        blocks = self._known_blocks(sequence, own_count, end)
        del blocks[self._usable_count(own_count, blocks) :]
        if not blocks:
            return
        length = (own_count + len(blocks)) * self._page_tokens
        for group, table in enumerate(sequence.tables):
            for page in table.drop_before(first_seen_page(length, table.window, self._page_tokens)):
                self._pool.let_go(page, keep=page in self._index)
            for block in blocks[len(table) - own_count :]:
                self._pool.share(block.pages[group])
                table.extend((block.pages[group],))
        sequence.chains += [block.chain for block in blocks]
        sequence.advance(length - sequence.computed_length)

    def _known_blocks(self, sequence: Sequence, first: int, end: int) -> list[KnownBlock]:
        """The blocks from `first` on that have their pages in all layers that keep all tokens, and end by `end`."""
        size, token_ids, unbounded = self._page_tokens, sequence.token_ids, self._unbounded
        blocks: list[KnownBlock] = []
        parent = sequence.chains[first - 1] if first else ROOT
        for start in range(first * size, end - size + 1, size):
            known = self._index.full_block(parent, token_ids[start : start + size])
            if known is None or NO_PAGE in known.pages[:unbounded]:
                break
            blocks.append(known)
            parent = known.chain
        return blocks

    def _usable_count(self, own_count: int, blocks: list[KnownBlock]) -> int:
        """The most of the blocks after which a token finds all that it sees, in layers with a window as well."""
        if not self._windows:
            return len(blocks)
        usable = 0
        whole_from = [0] * self._arena.group_count  # the block behind the last one whose page is lost
        for taken, block in enumerate(blocks, 1):
            total = own_count + taken
            is_whole = True
            for group, window in self._windows:
                if block.pages[group] == NO_PAGE:
                    whole_from[group] = total
                is_whole &= (
                    first_seen_page(total * self._page_tokens, window, self._page_tokens) >= whole_from[group]
                )
            if is_whole:
                usable = taken
        return usable

    def copy_beginning(self, sequence: Sequence, end: int, others: Iterable[Sequence]) -> None:
        """Copies the part of one more block that begins as the sequence goes on, up to `end` at most."""
        start = len(sequence.chains) * self._page_tokens
        found = self._longest_beginning(
            sequence, sequence.token_ids[start : start + self._page_tokens], others
        )
        if found is None or end <= start:
            return
        sources, count = found[0], min(found[1], end - start)
        for page in sources:
            self._pool.touch(page)
        if self._pool.available_count < 2 * len(sources):
            return  # a source itself might be taken
        for table, source in zip(sequence.tables, sources, strict=True):
            own = self._pool.take()
            assert own is not None, "enough are available"
            self._arena.copy(source, own, count)
            table.extend((own,))
        sequence.advance(count)

    def _longest_beginning(
        self, sequence: Sequence, wanted: list[int], others: Iterable[Sequence]
    ) -> tuple[list[int], int] | None:
        """Pages of a block and how many of the wanted tokens it begins with, after the sequence's own chains."""
        chains, size = sequence.chains, self._page_tokens
        if len(wanted) < MIN_COPIED_TOKENS:
            return None
        parent, index, start = (chains[-1] if chains else ROOT), len(chains), len(chains) * size
        best = self._index.longest_beginning(parent, wanted)
        pages, longest = (best[0].pages, best[1]) if best is not None else ([], MIN_COPIED_TOKENS - 1)
        for other in others:
            if other is sequence or other.computed_length - start <= longest or len(other.chains) < index:
                continue
            if index and other.chains[index - 1] != parent:
                continue
            if any(table.first > index for table in other.tables):
                continue
            count = common_length(other.token_ids[start : min(start + size, other.computed_length)], wanted)
            if count > longest:
                pages, longest = [table[index] for table in other.tables], count
        return (pages, longest) if pages else None

    def publish(self, sequence: Sequence) -> None:
        """Makes the sequence's full blocks known, and replaces its pages by those that are known already."""
        size, chains = self._page_tokens, sequence.chains
        while (len(chains) + 1) * size <= sequence.computed_length:
            index = len(chains)
            token_ids = sequence.token_ids[index * size : (index + 1) * size]
            parent = chains[-1] if chains else ROOT
            known = self._index.full_block(parent, token_ids)
            if known is None:
                known = self._index.enter([table[index] for table in sequence.tables], parent, token_ids)
            else:
                self._merge(sequence, index, known)
            chains.append(known.chain)

    def _merge(self, sequence: Sequence, index: int, known: KnownBlock) -> None:
        """Use the block that another sequence has computed meanwhile: one copy is enough."""
        for group, table in enumerate(sequence.tables):
            own, other = table[index], known.pages[group]
            if other == NO_PAGE:
                self._index.put(known, group, own)
            elif other != own:
                self._pool.share(other)
                table.replace(index, other)
                self._pool.let_go(own, keep=False)

    def publish_beginning(self, sequence: Sequence) -> None:
        """Makes the last block known, which is not full."""
        index, size = len(sequence.chains), self._page_tokens
        token_ids = sequence.token_ids[index * size : min((index + 1) * size, sequence.computed_length)]
        if not MIN_COPIED_TOKENS <= len(token_ids) < size:
            return
        parent = sequence.chains[-1] if sequence.chains else ROOT
        best = self._index.longest_beginning(parent, token_ids)
        if best is None or best[1] < len(token_ids):
            self._index.enter([table[index] for table in sequence.tables], parent, token_ids)

    def disown(self, sequence: Sequence) -> None:
        """Makes everything unknown that the sequence has computed."""
        pages = [page for table in sequence.tables for page in table.held_pages]
        for block in self._known_blocks(sequence, 0, sequence.computed_length):
            pages += block.pages  # its windows may have passed over some
        for page in pages:
            self._index.forget(page)
            self._pool.discard(page)
