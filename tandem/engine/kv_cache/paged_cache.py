"""Gives pages to sequences, shares those of common prefixes, and takes them back. Belongs to the engine's thread.

Pages are taken as a sequence grows. A page that several sequences hold is never written to: who wants to write copies
it first. When no page is left, the caller decides who restarts (`tandem.engine.core.page_scheduler`).
"""

from __future__ import annotations

from tandem.engine.kv_cache.arena import KvArena, KvUsage
from tandem.engine.kv_cache.page_pool import PagePool
from tandem.engine.kv_cache.page_table import pages_for
from tandem.engine.kv_cache.prefixes import MIN_COPIED_TOKENS, ROOT, PrefixIndex, common_length
from tandem.engine.kv_cache.sequence import Sequence


class PagedCache:
    """The pages of an arena and who holds them."""

    def __init__(self, arena: KvArena, *, reuses_prefixes: bool = True) -> None:
        self._arena = arena
        self._page_tokens = arena.page_tokens
        self._reuses_prefixes = reuses_prefixes
        self._prefixes = PrefixIndex(arena.page_tokens)
        self._pool = PagePool(arena.page_count, self._prefixes.forget)
        self._holders: dict[Sequence, None] = {}
        """Sequences with pages."""
        self._begun: set[Sequence] = set()
        """Sequences that write to pages of their own."""
        self.preemption_count = 0

    @property
    def holders(self) -> list[Sequence]:
        """Sequences that hold pages."""
        return list(self._holders)

    def usage(self, waiting_count: int = 0, sequence_count: int = 0) -> KvUsage:
        """Use of the arena. May be called from any thread: the figures are then of about the same moment."""
        size, pool = self._page_tokens, self._pool
        held = pool.page_count - pool.available_count
        return KvUsage(
            total_tokens=pool.page_count * size,
            reserved_tokens=held * size,
            used_tokens=sum(sequence.computed_length for sequence in self.holders),
            retained_tokens=pool.kept_count * size,
            sequence_count=sequence_count,
            waiting_count=waiting_count,
            preemption_count=self.preemption_count,
        )

    def is_ready(self, sequence: Sequence, end: int) -> bool:
        """True if the tokens from the first uncomputed one up to `end` may be written at once."""
        table = sequence.table
        return end <= table.capacity and sequence.computed_length >= len(sequence.chains) * self._page_tokens

    def make_ready(self, sequence: Sequence, end: int) -> bool:
        """Gives the sequence pages of its own for its uncomputed tokens up to `end`.

        Returns:
            False if there are too few pages. Those that it got stay with it.
        """
        if sequence not in self._begun and not self._may_begin(sequence):
            return False
        self._begun.add(sequence)
        return self._extend(sequence, end) and self._own_written_pages(sequence)

    def _may_begin(self, sequence: Sequence) -> bool:
        """True if all of its tokens find room, and some pages are left for older sequences that grow.

        Otherwise it would soon have to give up what it had begun. vLLM's scheduler has the same watermark, 1 % of all
        blocks.
        """
        lacking = pages_for(sequence.length, self._page_tokens) - len(sequence.table)
        watermark = self._pool.page_count // 100 if self._begun else 0
        return self._pool.available_count >= lacking + watermark or not self._has_older(sequence)

    def _has_older(self, sequence: Sequence) -> bool:
        return any(other.serial < sequence.serial for other in self._begun)

    def _extend(self, sequence: Sequence, end: int) -> bool:
        table = sequence.table
        self._holders[sequence] = None
        while table.capacity < end:
            page = self._pool.take()
            if page is None:
                return False
            table.extend((page,))
        return True

    def _own_written_pages(self, sequence: Sequence) -> bool:
        """Sees to it that what is about to be written belongs to the sequence alone, and is known to nobody."""
        size, table = self._page_tokens, sequence.table
        first = sequence.computed_length // size
        while len(sequence.chains) > first:
            index = len(sequence.chains) - 1
            page = table[index]
            if self._pool.holders(page) == 1:
                self._prefixes.forget(page)
            else:
                own = self._pool.take()
                if own is None:
                    return False
                kept = max(0, sequence.computed_length - index * size)
                if kept:
                    self._arena.copy(page, own, kept)
                table.replace(index, own)
                self._pool.let_go(page, keep=page in self._prefixes)
            sequence.chains.pop()
        return True

    def take_spare(self, sequence: Sequence, end: int) -> None:
        """Gives pages up to `end` as far as there are any that nobody holds."""
        self._extend(sequence, min(end, sequence.table.max_pages * self._page_tokens))

    def trim(self, sequence: Sequence) -> None:
        """Takes the pages back that lie behind the sequence's last token."""
        self._shorten(sequence, max(pages_for(sequence.length, self._page_tokens), len(sequence.chains)))

    def _shorten(self, sequence: Sequence, page_count: int) -> None:
        # The last page first: of a kept prefix, the end is taken before the beginning, without which it is lost.
        for page in sequence.table.shorten(page_count):
            self._pool.let_go(page, keep=page in self._prefixes)
        sequence.clean_length = min(sequence.clean_length, sequence.table.capacity)

    def reuse(self, sequence: Sequence) -> None:
        """Lets a sequence take over what others have computed of the tokens that it is about to compute."""
        known_pages, own_tokens = divmod(sequence.computed_length, self._page_tokens)
        if not self._reuses_prefixes or own_tokens or known_pages > len(sequence.chains):
            return
        self._holders[sequence] = None
        del sequence.chains[known_pages:]
        self._shorten(sequence, known_pages)
        self._share_full_pages(sequence)
        self._copy_beginning(sequence)

    def _share_full_pages(self, sequence: Sequence) -> None:
        size, chains = self._page_tokens, sequence.chains
        start = len(chains) * size
        while start + size <= sequence.length:
            parent = chains[-1] if chains else ROOT
            known = self._prefixes.full_page(parent, sequence.token_ids[start : start + size])
            if known is None:
                return
            self._pool.share(known.page)
            sequence.table.extend((known.page,))
            chains.append(known.chain)
            sequence.advance(size)
            start += size

    def _copy_beginning(self, sequence: Sequence) -> None:
        """Copies the part of one more page that begins as the sequence goes on."""
        size, chains = self._page_tokens, sequence.chains
        start = len(chains) * size
        wanted = sequence.token_ids[start : start + size]
        found = self._longest_beginning(sequence, wanted)
        if found is None:
            return
        source, count = found
        self._pool.touch(source)
        if self._pool.available_count < 2:
            return  # the source itself might be taken
        page = self._pool.take()
        assert page is not None, "two are available"
        self._arena.copy(source, page, count)
        sequence.table.extend((page,))
        sequence.advance(count)

    def _longest_beginning(self, sequence: Sequence, wanted: list[int]) -> tuple[int, int] | None:
        """A page and how many of the wanted tokens it begins with, after the sequence's own chains."""
        chains, size = sequence.chains, self._page_tokens
        if len(wanted) < MIN_COPIED_TOKENS:
            return None
        parent, index, start = (chains[-1] if chains else ROOT), len(chains), len(chains) * size
        best = self._prefixes.longest_beginning(parent, wanted)
        page, longest = (best[0].page, best[1]) if best is not None else (-1, MIN_COPIED_TOKENS - 1)
        for other in self._holders:
            if other is sequence or other.computed_length - start <= longest or len(other.chains) < index:
                continue
            if index and other.chains[index - 1] != parent:
                continue
            count = common_length(other.token_ids[start : min(start + size, other.computed_length)], wanted)
            if count > longest:
                page, longest = other.table[index], count
        return None if page < 0 else (page, longest)

    def computed(self, sequence: Sequence) -> None:
        """Makes the sequence's full pages known to others. To be called after each step of it."""
        size, chains = self._page_tokens, sequence.chains
        if not self._reuses_prefixes or sequence.is_private:
            return
        while (len(chains) + 1) * size <= sequence.computed_length:
            index = len(chains)
            token_ids = sequence.token_ids[index * size : (index + 1) * size]
            parent, page = (chains[-1] if chains else ROOT), sequence.table[index]
            known = self._prefixes.full_page(parent, token_ids)
            if known is None:
                known = self._prefixes.enter(page, parent, token_ids)
            elif known.page != page:  # another one has computed the same meanwhile: one copy is enough
                self._pool.share(known.page)
                sequence.table.replace(index, known.page)
                self._pool.let_go(page, keep=False)
            chains.append(known.chain)

    def release(self, sequence: Sequence) -> None:
        """Takes all pages back. What may be of use to others is kept for as long as there is room."""
        self._keep_beginning(sequence)
        self._let_go(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Takes all pages of a sequence back that goes on later: its tokens are then computed again."""
        self.preemption_count += 1
        self._let_go(sequence)
        sequence.restart()

    def distrust(self, sequence: Sequence) -> None:
        """Takes all pages back, and nobody reuses what is in them: the numbers are wrong."""
        for page in sequence.table.pages:
            self._prefixes.forget(page)
        self._let_go(sequence)
        sequence.restart()

    def _keep_beginning(self, sequence: Sequence) -> None:
        """Makes the last page known, which is not full."""
        index, size = len(sequence.chains), self._page_tokens
        token_ids = sequence.token_ids[index * size : min((index + 1) * size, sequence.computed_length)]
        if not self._reuses_prefixes or sequence.is_private or not MIN_COPIED_TOKENS <= len(token_ids) < size:
            return
        parent = sequence.chains[-1] if sequence.chains else ROOT
        best = self._prefixes.longest_beginning(parent, token_ids)
        if best is None or best[1] < len(token_ids):
            self._prefixes.enter(sequence.table[index], parent, token_ids)

    def _let_go(self, sequence: Sequence) -> None:
        self._shorten(sequence, 0)
        self._holders.pop(sequence, None)
        self._begun.discard(sequence)
