"""Gives pages to sequences, shares those of common prefixes, and takes them back. Belongs to the engine's thread.

Pages are taken as a sequence grows, one for each group of layers, and given back once they lie before a group's window.
A page that several sequences hold is never written to: who wants to write copies it first. When no page is left, the
caller decides who restarts (`tandem.engine.core.scheduler`).

Prefixes are found block by block. A block is the tokens of one page. A full block is known by its tokens and by
everything before them, which a number stands for (its *chain*): the key of a block is the chain of the block before it
and its own tokens. The table compares the tokens themselves, so no two prefixes are ever mistaken for each other. As in
vLLM's automatic prefix caching, but with tokens in place of hashes. The chain of a sequence's first block is its scope,
as vLLM's `cache_salt`: nobody finds a block of another scope, and all scopes share the pages, whose latest remain.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import count
from operator import ge, itemgetter

from tandem.engine.interface import KvUsage
from tandem.engine.kv_cache.arena import KvArena, PageTable, most_pages, pages_for
from tandem.engine.kv_cache.sequence import Chain, Sequence
from tandem.errors import InvalidRequestError
from tandem.model.types import common_length

MIN_COPIED_TOKENS = 16
"""Fewer tokens of a block are computed: a copy costs two calls a layer, however short."""

NO_PAGE = -1
"""In place of a page that was lost."""


@dataclass(slots=True, eq=False)
class KnownBlock:
    """Tokens whose keys and values are computed."""

    pages: list[int]
    """A page for each group of layers, `NO_PAGE` where it is lost. There is at least one."""
    parent: Chain
    """Of everything before the block."""
    chain: int
    """Chain of everything up to its end, if it is full."""
    token_ids: tuple[int, ...]


def _beginning(parent: Chain, token_ids: SequenceOf[int]) -> tuple[Chain, ...]:
    """The key that blocks share if they may be mistaken for each other at first."""
    return parent, *token_ids[:MIN_COPIED_TOKENS]


class PagePool:
    """Who holds each page, and which block of known tokens it belongs to.

    A page that nobody holds is unused, or kept for its block. Kept pages are taken when no unused one is left, the one
    that was let go first, first. Not thread-safe; pure bookkeeping.
    """

    def __init__(self, page_count: int) -> None:
        self._holders = [0] * page_count
        self._unused = list(range(page_count - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._chains = count(1)
        self._known: dict[int, KnownBlock] = {}
        """By page."""
        self._alike: dict[tuple[Chain, ...], dict[tuple[int, ...], KnownBlock]] = {}
        """By chain before them and first tokens, then by all of their tokens, the latest last."""

    @property
    def available_count(self) -> int:
        return len(self._unused) + len(self._kept)

    @property
    def kept_count(self) -> int:
        """Pages that nobody holds and whose content may still be of use."""
        return len(self._kept)

    def holders(self, page: int) -> int:
        return self._holders[page]

    def take(self) -> int:
        """A page for one holder, with any content. One has to be available."""
        if self._unused:
            page = self._unused.pop()
        else:
            page, _ = self._kept.popitem(last=False)
            self.forget(page)
        self._holders[page] = 1
        return page

    def share(self, page: int) -> None:
        self._kept.pop(page, None)
        self._holders[page] += 1

    def let_go(self, *pages: int) -> None:
        """Remove a holder of each page. What nobody holds is kept if it belongs to a block."""
        for page in pages:
            if self._holders[page] < 1:
                raise ValueError(f"page {page} is held by nobody")
            self._holders[page] -= 1
            if self._holders[page] == 0 and page in self._known:
                self._kept[page] = None
            elif self._holders[page] == 0:
                self._unused.append(page)

    def touch(self, pages: SequenceOf[int]) -> None:
        """Let those of the pages that are kept be taken last."""
        for page in pages:
            if page in self._kept:
                self._kept.move_to_end(page)

    def full_block(self, parent: Chain, token_ids: SequenceOf[int]) -> KnownBlock | None:
        """The block of exactly these tokens after the chain `parent`."""
        return self._alike.get(_beginning(parent, token_ids), {}).get(tuple(token_ids))

    def longest_beginning(self, parent: Chain, token_ids: SequenceOf[int]) -> tuple[KnownBlock, int] | None:
        """The block without a lost page that begins with most of these tokens, at least `MIN_COPIED_TOKENS`, after the
        chain `parent`, and how many."""
        alike = self._alike.get(_beginning(parent, token_ids), {}).values()
        # Of many that begin alike, the latest are compared for the longest match
        latest = [known for known in list(alike)[-64:] if NO_PAGE not in known.pages]
        matches = ((known, common_length(known.token_ids, token_ids)) for known in latest)
        return max(matches, key=itemgetter(1), default=None)

    def enter(self, pages: SequenceOf[int], parent: Chain, token_ids: SequenceOf[int]) -> KnownBlock:
        """Makes a block of at least `MIN_COPIED_TOKENS` known, with a page for each group. A full one must not be known
        already."""
        known = KnownBlock([NO_PAGE] * len(pages), parent, next(self._chains), tuple(token_ids))
        for group, page in enumerate(pages):
            self.put(known, group, page)
        self._alike.setdefault(_beginning(parent, token_ids), {})[known.token_ids] = known
        return known

    def put(self, known: KnownBlock, group: int, page: int) -> None:
        """Sets the page of a group that has none in a block."""
        self.forget(page)
        known.pages[group] = page
        self._known[page] = known

    def forget(self, page: int) -> None:
        """A page is going to hold something else. A block without pages is not known any more."""
        if page in self._kept:
            del self._kept[page]
            self._unused.append(page)
        known = self._known.pop(page, None)
        if known is None:
            return
        known.pages[known.pages.index(page)] = NO_PAGE
        beginning = _beginning(known.parent, known.token_ids)
        alike = self._alike.get(beginning, {})
        if all(other == NO_PAGE for other in known.pages) and alike.get(known.token_ids) is known:
            del alike[known.token_ids]
            if not alike:
                del self._alike[beginning]


class PagedCache:
    """See `SequenceCache`."""

    def __init__(self, arena: KvArena, *, reuses_prefixes: bool = True) -> None:
        self.shape = self._arena = arena
        self._page_tokens = arena.page_tokens
        self._reuses_prefixes = reuses_prefixes
        self._pool = PagePool(arena.page_count)
        self._unbounded = arena.windows.count(None)
        """Groups that keep all tokens. They come first."""
        self._has_windows = self._unbounded < arena.group_count
        self._holders: dict[Sequence, bool] = {}
        """Sequences with pages, and whether they write to some of their own."""
        self.preemption_count = 0

    @property
    def holders(self) -> list[Sequence]:
        return list(self._holders)

    def usage(self) -> KvUsage:
        arena = self._arena
        pool = self._pool
        counts = arena.page_count, arena.page_count - pool.available_count, pool.kept_count
        total, reserved, retained = (count * self._page_tokens // arena.group_count for count in counts)
        used = sum(sequence.computed_length for sequence in self.holders)
        return KvUsage(total, reserved, used, retained, self.preemption_count)

    def check_rows(self, sequence: Sequence, row_count: int) -> None:
        if not self._has_windows:
            return  # the longest sequence fits in any steps
        needed = most_pages(self._arena.windows, sequence.length, row_count, self._page_tokens)
        if needed > self._arena.page_count:
            raise InvalidRequestError(
                f"Rows were asked for the last {row_count} positions, whose keys and values take {needed} pages at "
                f"once, but the KV cache has {self._arena.page_count}; ask for fewer at a time."
            )

    def is_ready(self, sequence: Sequence, end: int) -> bool:
        computed = sequence.computed_length
        return (
            end <= sequence.table.capacity
            and computed >= len(sequence.chains) * self._page_tokens
            and not self.lacks_seen_pages(sequence)
        )

    def lacks_seen_pages(self, sequence: Sequence) -> bool:
        """True if it rolled back further than its pages reach: it computes all of its tokens again."""
        return self._has_windows and sequence.computed_length < sequence.shortest_rollback

    def make_ready(self, sequence: Sequence, end: int) -> bool:
        if self.lacks_seen_pages(sequence):
            sequence.chains.clear()
            self._shorten(sequence, 0)
        if not self._holders.get(sequence) and not self._may_begin(sequence):
            return False
        self._holders[sequence] = True
        return self._extend(sequence, end) and self._own_written_pages(sequence)

    def _may_begin(self, sequence: Sequence) -> bool:
        """True if all of its tokens find room, and some pages are left for older sequences that grow.

        Otherwise it would soon have to give up what it had begun. vLLM's scheduler has the same watermark, 1 % of all
        blocks.
        """
        begun = [other for other, has_begun in self._holders.items() if has_begun]
        watermark = self._arena.page_count // 100 if begun else 0
        length = sequence.length
        # For all of its tokens that a window does not pass over
        present = [max(len(table), table.first_kept(length)) for table in sequence.tables]
        lacking = len(present) * pages_for(length, self._page_tokens) - sum(present)
        has_older = any(other.serial < sequence.serial for other in begun)
        return self._pool.available_count >= lacking + watermark or not has_older

    def _extend(self, sequence: Sequence, end: int) -> bool:
        self._holders.setdefault(sequence, False)
        while sequence.table.capacity < end:
            if self._pool.available_count < len(sequence.tables):
                return False
            for table in sequence.tables:
                table.extend((self._pool.take(),))
        return True

    def _own_written_pages(self, sequence: Sequence) -> bool:
        """Make the pages that are about to be written the sequence's own, known to no other."""
        first = sequence.computed_length // self._page_tokens
        while len(sequence.chains) > first:
            if not all(self._own_last_page(sequence, table) for table in sequence.tables):
                return False
            sequence.chains.pop()
        return True

    def _own_last_page(self, sequence: Sequence, table: PageTable) -> bool:
        index = len(sequence.chains) - 1
        page = table[index]
        if self._pool.holders(page) == 1:
            self._pool.forget(page)
            return True
        if not self._pool.available_count:
            return False
        own = self._pool.take()
        if (kept := sequence.computed_length - index * self._page_tokens) > 0:
            self._arena.copy(page, own, kept)
        table.replace(index, own)
        self._pool.let_go(page)
        return True

    def take_spare(self, sequence: Sequence, count: int) -> int:
        self._extend(sequence, min(sequence.length + count, sequence.table.max_tokens))
        return sequence.table.capacity - sequence.length

    def take_over(self, sequence: Sequence, positions: SequenceOf[int]) -> None:
        """See `SequenceCache`. The pages of the tokens must be the sequence's own; see `make_ready`."""
        self._arena.move(sequence.tables, positions, sequence.computed_length)
        sequence.advance(len(positions))

    def trim(self, sequence: Sequence) -> None:
        self._shorten(sequence, max(pages_for(sequence.length, self._page_tokens), len(sequence.chains)))

    def _shorten(self, sequence: Sequence, page_count: int) -> None:
        # The last page first: of a kept prefix, the end is taken before the beginning, without which it is lost.
        for table in sequence.tables:
            self._pool.let_go(*table.shorten(page_count))
        sequence.clean_length = min(sequence.clean_length, sequence.table.capacity)

    def reuse(self, sequence: Sequence, row_count: int = 0) -> None:
        if not self._reuses_prefixes or sequence.is_private:
            return
        known_pages, own_tokens = divmod(sequence.computed_length, self._page_tokens)
        if own_tokens or known_pages > len(sequence.chains):
            return
        self._holders.setdefault(sequence, False)
        del sequence.chains[known_pages:]
        self._shorten(sequence, known_pages)
        end = sequence.length - row_count
        self._share_blocks(sequence, end)
        self._copy_beginning(sequence, end)

    def after_step(self, sequence: Sequence) -> None:
        if self._reuses_prefixes and not sequence.is_private:
            self._publish(sequence)
        if self._has_windows:
            for table in sequence.tables:
                self._pool.let_go(*table.drop_before(table.first_kept(sequence.computed_length)))

    def release(self, sequence: Sequence) -> None:
        if self._reuses_prefixes and not sequence.is_private:
            self._publish_beginning(sequence)
        self._let_go(sequence)

    def preempt(self, sequence: Sequence) -> None:
        self.preemption_count += 1
        self._let_go(sequence)
        sequence.restart()

    def distrust(self, sequence: Sequence) -> None:
        pages = [page for table in sequence.tables for page in table.held_pages]
        for block in self._known_blocks(sequence, 0, sequence.computed_length):
            pages += block.pages  # its windows may have passed over some
        for page in pages:
            self._pool.forget(page)
        self._let_go(sequence)
        sequence.restart()

    def _let_go(self, sequence: Sequence) -> None:
        self._shorten(sequence, 0)
        self._holders.pop(sequence, None)

    # ---- prefixes

    def _share_blocks(self, sequence: Sequence, end: int) -> None:
        """Gives a sequence the known blocks that follow its chains and end at `end` at the latest."""
        own_count = len(sequence.chains)
        blocks = self._known_blocks(sequence, own_count, end)
        del blocks[self._usable_count(sequence, blocks) :]
        if not blocks:
            return
        length = (own_count + len(blocks)) * self._page_tokens
        for group, table in enumerate(sequence.tables):
            self._pool.let_go(*table.drop_before(table.first_seen(length)))
            for block in blocks[len(table) - own_count :]:
                self._pool.share(block.pages[group])
                table.extend((block.pages[group],))
        sequence.chains += [block.chain for block in blocks]
        sequence.advance_reused(length - sequence.computed_length)

    def _known_blocks(self, sequence: Sequence, first: int, end: int) -> list[KnownBlock]:
        """The blocks from `first` on that have their pages in all layers that keep all tokens, and end by `end`."""
        size = self._page_tokens
        blocks: list[KnownBlock] = []
        parent: Chain = sequence.chains[first - 1] if first else sequence.scope
        for start in range(first * size, end - size + 1, size):
            known = self._pool.full_block(parent, sequence.token_ids[start : start + size])
            if known is None or NO_PAGE in known.pages[: self._unbounded]:
                break
            blocks.append(known)
            parent = known.chain
        return blocks

    def _usable_count(self, sequence: Sequence, blocks: list[KnownBlock]) -> int:
        """The most of the blocks after which a token finds all that it sees, in layers with a window as well."""
        if not self._has_windows:
            return len(blocks)
        usable = 0
        own_count = len(sequence.chains)
        whole_from = [0] * len(sequence.tables)  # the block behind the last one whose page is lost
        for end, block in enumerate(blocks, own_count + 1):
            lost = (page == NO_PAGE for page in block.pages)
            whole_from = [end if is_lost else first for is_lost, first in zip(lost, whole_from, strict=True)]
            seen_from = (table.first_seen(end * self._page_tokens) for table in sequence.tables)
            if all(map(ge, seen_from, whole_from)):
                usable = end - own_count
        return usable

    def _copy_beginning(self, sequence: Sequence, end: int) -> None:
        """Copies the part of one more block that begins as the sequence goes on, up to `end` at most."""
        start = len(sequence.chains) * self._page_tokens
        found = self._longest_beginning(sequence, sequence.token_ids[start : start + self._page_tokens])
        if found is None or end <= start:
            return
        sources = found[0]
        count = min(found[1], end - start)
        self._pool.touch(sources)
        if self._pool.available_count < 2 * len(sources):
            return  # a source itself might be taken
        for table, source in zip(sequence.tables, sources, strict=True):
            own = self._pool.take()
            self._arena.copy(source, own, count)
            table.extend((own,))
        sequence.advance_reused(count)

    def _longest_beginning(self, sequence: Sequence, wanted: list[int]) -> tuple[list[int], int] | None:
        """Pages of a block and how many of the wanted tokens it begins with, after the sequence's own chains."""
        chains = sequence.chains
        size = self._page_tokens
        index = len(chains)
        start = len(chains) * size
        best = self._pool.longest_beginning(sequence.last_chain, wanted)
        pages, longest = (best[0].pages, best[1]) if best is not None else ([], MIN_COPIED_TOKENS - 1)
        for other in self._holders:
            if (
                other is sequence
                or other.scope != sequence.scope
                or other.computed_length - start <= longest
                or other.chains[:index] != chains
            ):
                continue
            if any(table.first > index for table in other.tables):
                continue
            count = common_length(other.token_ids[start : min(start + size, other.computed_length)], wanted)
            if count > longest:
                pages = [table[index] for table in other.tables]
                longest = count
        return (pages, longest) if pages else None

    def _publish(self, sequence: Sequence) -> None:
        """Makes the sequence's full blocks known, and replaces its pages by those that are known already."""
        size = self._page_tokens
        chains = sequence.chains
        while (len(chains) + 1) * size <= sequence.computed_length:
            index = len(chains)
            token_ids = sequence.token_ids[index * size : (index + 1) * size]
            own = [table[index] for table in sequence.tables]
            known = self._pool.full_block(sequence.last_chain, token_ids)
            if known is None:
                known = self._pool.enter(own, sequence.last_chain, token_ids)
            for group, (table, page) in enumerate(zip(sequence.tables, own, strict=True)):
                other = known.pages[group]
                if other == NO_PAGE:
                    self._pool.put(known, group, page)
                elif other != page:  # another sequence has computed it meanwhile: one copy is enough
                    self._pool.share(other)
                    table.replace(index, other)
                    self._pool.let_go(page)
            chains.append(known.chain)

    def _publish_beginning(self, sequence: Sequence) -> None:
        index = len(sequence.chains)
        size = self._page_tokens
        token_ids = sequence.token_ids[index * size : min((index + 1) * size, sequence.computed_length)]
        if not MIN_COPIED_TOKENS <= len(token_ids) < size:
            return
        best = self._pool.longest_beginning(sequence.last_chain, token_ids)
        if best is None or best[1] < len(token_ids):
            self._pool.enter([table[index] for table in sequence.tables], sequence.last_chain, token_ids)
