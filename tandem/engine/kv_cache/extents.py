"""Which tokens of the KV arena belong to which sequence: contiguous extents, first fit, in whole granules.

A sequence keeps one contiguous run of the arena for its whole life, sized for the longest it may become. Attention can
then read it in place on any device, a rollback moves nothing, and room is known to suffice before any work starts.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

GRANULE_TOKENS = 64
"""Extents start and end at multiples of this, so that those of similar requests are interchangeable."""


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """A run of the arena."""

    start: int
    """First token."""
    capacity: int
    """Number of tokens."""

    @property
    def end(self) -> int:
        """One past the last token."""
        return self.start + self.capacity


def granules(tokens: int) -> int:
    """`tokens` rounded up to whole granules, in tokens."""
    return -(-tokens // GRANULE_TOKENS) * GRANULE_TOKENS


class ExtentPool:
    """Allocates extents of an arena of `total_tokens`. Not thread-safe; pure bookkeeping."""

    def __init__(self, total_tokens: int) -> None:
        self.total_tokens = total_tokens // GRANULE_TOKENS * GRANULE_TOKENS
        self._free = [Extent(0, self.total_tokens)] if self.total_tokens else []
        self._free_tokens = self.total_tokens

    @property
    def reserved_tokens(self) -> int:
        """Tokens inside allocated extents."""
        return self.total_tokens - self._free_tokens

    def allocate(self, tokens: int) -> Extent | None:
        """The lowest extent that holds `tokens`, or None when no free run is long enough.

        Lowest first keeps live sequences next to each other, which is what lets attention batch them without a copy.
        """
        wanted = granules(tokens)
        for index, run in enumerate(self._free):
            if run.capacity >= wanted:
                rest = Extent(run.start + wanted, run.capacity - wanted)
                self._free[index : index + 1] = [rest] if rest.capacity else []
                self._free_tokens -= wanted
                return Extent(run.start, wanted)
        return None

    def free(self, extent: Extent) -> None:
        """Takes back an extent and joins it with its free neighbours."""
        insort(self._free, extent)
        self._free_tokens += extent.capacity
        index = self._free.index(extent)
        if index + 1 < len(self._free) and extent.end == self._free[index + 1].start:
            extent = Extent(extent.start, extent.capacity + self._free.pop(index + 1).capacity)
            self._free[index] = extent
        if index and self._free[index - 1].end == extent.start:
            before = self._free[index - 1]
            self._free[index - 1 : index + 1] = [Extent(before.start, before.capacity + extent.capacity)]
