"""Prefixes that some sequence has computed and another may take over.

Taking over is a copy within the arena: many times cheaper than computing, and sequences share nothing that could
change. The index belongs to the engine's thread, the only one that writes to the arena: its prefixes stay in the
arena until the thread lets another sequence write there.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from operator import attrgetter

from tandem.engine.kv_cache.extents import Extent, granules
from tandem.engine.kv_cache.sequence import Sequence

MIN_PREFIX_TOKENS = 16
"""Shorter prefixes are computed: a copy costs two calls a layer, however short."""

_MAX_RETAINED = 256
"""Prefixes of released sequences that are looked through for each new one."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens whose KV is at the start of an extent."""

    extent: Extent
    token_ids: SequenceOf[int]


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Source of the first `length` tokens of a sequence."""

    extent: Extent
    length: int


class PrefixIndex:
    """Finds the longest computed prefix, in open sequences and in the extents of released ones."""

    def __init__(self) -> None:
        self._open: set[Sequence] = set()
        self._retained: dict[Extent, Prefix] = {}  # oldest first

    def find(self, token_ids: SequenceOf[int]) -> PrefixMatch | None:
        """The longest prefix of `token_ids` that is worth a copy."""
        candidates = [
            *self._retained.values(),
            *(
                Prefix(sequence.extent, sequence.token_ids[: sequence.computed_length])
                for sequence in self._open
            ),
        ]
        matches = (
            PrefixMatch(known.extent, _common_length(known.token_ids, token_ids)) for known in candidates
        )
        best = max(matches, key=attrgetter("length"), default=None)
        return best if best is not None and best.length >= MIN_PREFIX_TOKENS else None

    def enter(self, sequence: Sequence) -> None:
        """A sequence starts to write to its extent, which overwrites earlier prefixes there."""
        extent = sequence.extent
        for other in [
            other for other in self._retained if other.start < extent.end and extent.start < other.end
        ]:
            del self._retained[other]
        self._open.add(sequence)

    def leave(self, sequence: Sequence) -> Extent | None:
        """A sequence is released.

        Returns:
            The part of its extent that is worth keeping, None for nothing.
        """
        self._open.discard(sequence)
        if sequence.computed_length < MIN_PREFIX_TOKENS:
            return None
        kept = Extent(sequence.extent.start, granules(sequence.computed_length))
        self._retained[kept] = Prefix(kept, sequence.token_ids[: sequence.computed_length])
        if len(self._retained) > _MAX_RETAINED:
            del self._retained[next(iter(self._retained))]
        return kept


def _common_length(known: SequenceOf[int], wanted: SequenceOf[int]) -> int:
    limit = min(len(known), len(wanted))
    return next((index for index in range(limit) if known[index] != wanted[index]), limit)
