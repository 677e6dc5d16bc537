"""Gives pages to sequences, shares those of common prefixes, and takes them back. Belongs to the engine's thread.

Pages are taken as a sequence grows, one for each group of layers, and given back once they lie before a group's window.
A page that several sequences hold is never written to: who wants to write copies it first. When no page is left, the
caller decides who restarts (`tandem.engine.core.scheduler`).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from tandem.engine.interface import KvUsage
from tandem.engine.kv_cache.arena import KvArena, PagePool, first_kept_page, most_pages, pages_for
from tandem.engine.kv_cache.prefixes import PrefixIndex, PrefixSharing
from tandem.engine.kv_cache.sequence import Sequence
from tandem.errors import InvalidRequestError


class PagedCache:
    """See `SequenceCache`. The pages of an arena, and who holds them."""

    def __init__(self, arena: KvArena, *, reuses_prefixes: bool = True) -> None:
        self._arena = arena
        self._page_tokens = arena.page_tokens
        self._reuses_prefixes = reuses_prefixes
        self._prefixes = PrefixIndex(arena.page_tokens)
        self._pool = PagePool(arena.page_count, self._prefixes.forget)
        self._sharing = PrefixSharing(arena, self._pool, self._prefixes)
        self._has_windows = any(window is not None for window in arena.windows)
        self._holders: dict[Sequence, None] = {}
        """Sequences with pages."""
        self._begun: set[Sequence] = set()
        """Sequences that write to pages of their own."""
        self.preemption_count = 0

    @property
    def holders(self) -> list[Sequence]:
        return list(self._holders)

    def usage(self, waiting_count: int = 0, sequence_count: int = 0) -> KvUsage:
        pool, groups = self._pool, self._arena.group_count
        held = pool.page_count - pool.available_count
        return KvUsage(
            total_tokens=pool.page_count * self._page_tokens // groups,
            reserved_tokens=held * self._page_tokens // groups,
            used_tokens=sum(sequence.computed_length for sequence in self.holders),
            retained_tokens=pool.kept_count * self._page_tokens // groups,
            sequence_count=sequence_count,
            waiting_count=waiting_count,
            preemption_count=self.preemption_count,
        )

    def check_rows(self, sequence: Sequence, row_count: int) -> None:
        if not self._has_windows:
            return  # the longest sequence fits in any steps
        needed = most_pages(self._arena.windows, sequence.length, row_count, self._page_tokens)
        if needed > self._pool.page_count:
            raise InvalidRequestError(
                f"Rows were asked for the last {row_count} positions, whose keys and values take {needed} pages at "
                f"once, but the KV cache has {self._pool.page_count}; ask for fewer at a time."
            )

    def is_ready(self, sequence: Sequence, end: int) -> bool:
        computed = sequence.computed_length
        return (
            end <= sequence.table.capacity
            and computed >= len(sequence.chains) * self._page_tokens
            and not self._lacks_seen_pages(sequence)
        )

    def _lacks_seen_pages(self, sequence: Sequence) -> bool:
        """True if it rolled back further than its pages reach: it computes all of its tokens again."""
        return self._has_windows and sequence.computed_length < sequence.shortest_rollback

    def make_ready(self, sequence: Sequence, end: int) -> bool:
        if self._lacks_seen_pages(sequence):
            sequence.chains.clear()
            self._shorten(sequence, 0)
        if sequence not in self._begun and not self._may_begin(sequence):
            return False
        self._begun.add(sequence)
        return self._extend(sequence, end) and self._own_written_pages(sequence)

    def _may_begin(self, sequence: Sequence) -> bool:
        """True if all of its tokens find room, and some pages are left for older sequences that grow.

        Otherwise it would soon have to give up what it had begun. vLLM's scheduler has the same watermark, 1 % of all
        blocks.
        """
        watermark = self._pool.page_count // 100 if self._begun else 0
        lacking = self._lacking_count(sequence)
        return self._pool.available_count >= lacking + watermark or not self._has_older(sequence)

    def _lacking_count(self, sequence: Sequence) -> int:
        """Pages that it has yet to get to keep all of its tokens that a window does not pass over."""
        size, length = self._page_tokens, sequence.length
        return sum(
            pages_for(length, size) - max(len(table), first_kept_page(length, table.window, size))
            for table in sequence.tables
        )

    def _has_older(self, sequence: Sequence) -> bool:
        return any(other.serial < sequence.serial for other in self._begun)

    def _extend(self, sequence: Sequence, end: int) -> bool:
        self._holders[sequence] = None
        while sequence.table.capacity < end:
            if self._pool.available_count < len(sequence.tables):
                return False
            for table in sequence.tables:
                page = self._pool.take()
                assert page is not None, "enough are available"
                table.extend((page,))
        return True

    def _own_written_pages(self, sequence: Sequence) -> bool:
        """Make the pages that are about to be written the sequence's own, known to no other."""
        first = sequence.computed_length // self._page_tokens
        while len(sequence.chains) > first:
            for group in range(len(sequence.tables)):
                if not self._own_page(sequence, group, len(sequence.chains) - 1):
                    return False
            sequence.chains.pop()
        return True

    def _own_page(self, sequence: Sequence, group: int, index: int) -> bool:
        table = sequence.tables[group]
        page = table[index]
        if self._pool.holders(page) == 1:
            self._prefixes.forget(page)
            return True
        own = self._pool.take()
        if own is None:
            return False
        kept = max(0, sequence.computed_length - index * self._page_tokens)
        if kept:
            self._arena.copy(page, own, kept)
        table.replace(index, own)
        self._pool.let_go(page, keep=page in self._prefixes)
        return True

    def take_spare(self, sequence: Sequence, count: int) -> int:
        self._extend(sequence, min(sequence.length + count, sequence.table.max_pages * self._page_tokens))
        return sequence.table.capacity - sequence.length

    def take_over(self, sequence: Sequence, positions: SequenceOf[int]) -> None:
        """Makes what lies at these positions the keys and values of the sequence's first uncomputed tokens.

        The pages of the tokens must be the sequence's own; see `make_ready`.
        """
        self._arena.move(sequence.tables, positions, sequence.computed_length)
        sequence.advance(len(positions))

    def trim(self, sequence: Sequence) -> None:
        self._shorten(sequence, max(pages_for(sequence.length, self._page_tokens), len(sequence.chains)))

    def _shorten(self, sequence: Sequence, page_count: int) -> None:
        # The last page first: of a kept prefix, the end is taken before the beginning, without which it is lost.
        for table in sequence.tables:
            for page in table.shorten(page_count):
                self._pool.let_go(page, keep=page in self._prefixes)
        sequence.clean_length = min(sequence.clean_length, sequence.table.capacity)

    def reuse(self, sequence: Sequence, row_count: int = 0) -> None:
        known_pages, own_tokens = divmod(sequence.computed_length, self._page_tokens)
        if not self._reuses_prefixes or own_tokens or known_pages > len(sequence.chains):
            return
        self._holders[sequence] = None
        del sequence.chains[known_pages:]
        self._shorten(sequence, known_pages)
        end = sequence.length - row_count
        self._sharing.share_blocks(sequence, end)
        self._sharing.copy_beginning(sequence, end, self._holders)

    def computed(self, sequence: Sequence) -> None:
        """Makes the sequence's full blocks known to others, and takes back what lies before its windows. To be called
        after each step of it."""
        if self._reuses_prefixes and not sequence.is_private:
            self._sharing.publish(sequence)
        if self._has_windows:
            for table in sequence.tables:
                first = first_kept_page(sequence.computed_length, table.window, self._page_tokens)
                for page in table.drop_before(first):
                    self._pool.let_go(page, keep=page in self._prefixes)

    def release(self, sequence: Sequence) -> None:
        if self._reuses_prefixes and not sequence.is_private:
            self._sharing.publish_beginning(sequence)
        self._let_go(sequence)

    def preempt(self, sequence: Sequence) -> None:
        self.preemption_count += 1
        self._let_go(sequence)
        sequence.restart()

    def distrust(self, sequence: Sequence) -> None:
        self._sharing.disown(sequence)
        self._let_go(sequence)
        sequence.restart()

    def _let_go(self, sequence: Sequence) -> None:
        self._shorten(sequence, 0)
        self._holders.pop(sequence, None)
        self._begun.discard(sequence)
