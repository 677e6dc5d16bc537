"""Which pages of the KV arena are in use, and by how many sequences."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class PagePool:
    """Counts the holders of each page. A page without any is either unused, or kept for what is in it.

    Kept pages are taken when no unused one is left, the one that was let go first, first. Not thread-safe; pure
    bookkeeping.
    """

    def __init__(self, page_count: int, forget: Callable[[int], None] = lambda page: None) -> None:
        """
        Args:
            page_count: pages in all, numbered from 0.
            forget: told of each kept page that is taken: what was in it is lost.
        """
        self.page_count = page_count
        self._forget = forget
        self._holders = [0] * page_count
        self._unused = list(range(page_count - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def available_count(self) -> int:
        """Pages that nobody holds."""
        return len(self._unused) + len(self._kept)

    @property
    def kept_count(self) -> int:
        """Pages that nobody holds and whose content may still be of use."""
        return len(self._kept)

    def holders(self, page: int) -> int:
        """Number of sequences that hold a page."""
        return self._holders[page]

    def take(self) -> int | None:
        """A page for one holder, with any content; None if every page is held."""
        if self._unused:
            page = self._unused.pop()
        elif self._kept:
            page, _ = self._kept.popitem(last=False)
            self._forget(page)
        else:
            return None
        self._holders[page] = 1
        return page

    def share(self, page: int) -> None:
        """A page that is held or kept gets another holder."""
        self._kept.pop(page, None)
        self._holders[page] += 1

    def let_go(self, page: int, *, keep: bool) -> None:
        """A holder less. The last one decides whether the content is kept."""
        if self._holders[page] < 1:
            raise ValueError(f"page {page} is held by nobody")
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if keep:
            self._kept[page] = None
        else:
            self._unused.append(page)

    def discard(self, page: int) -> None:
        """The content of a page is of no use any more."""
        if page in self._kept:
            del self._kept[page]
            self._unused.append(page)

    def touch(self, page: int) -> None:
        """A use of a kept page."""
        if page in self._kept:
            self._kept.move_to_end(page)
