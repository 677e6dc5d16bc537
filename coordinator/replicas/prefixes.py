"""Which draft has read which beginning of a text: a new sequence that continues it is read there at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

_MOST = 4096
"""Beginnings that are remembered, the latest: some hundred bytes each."""


class Prefixes:
    """Beginnings of sequences by the address that has them."""

    def __init__(self) -> None:
        self._holders: OrderedDict[int, str] = OrderedDict()

    def add(self, address: str, token_ids: Sequence[int]) -> None:
        """The draft at this address reads these tokens."""
        for _, key in _beginnings(token_ids):
            self._holders[key] = address
            self._holders.move_to_end(key)
        while len(self._holders) > _MOST:
            self._holders.popitem(last=False)

    def held(self, token_ids: Sequence[int]) -> dict[str, int]:
        """How many of the first tokens each address is known to have read."""
        found = {}
        for length, key in _beginnings(token_ids):
            if (address := self._holders.get(key)) is not None:
                found[address] = length
        return found


def _beginnings(token_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Lengths of beginnings, the shortest first, each with its hash."""
    # Tokens of a beginning that is remembered, which a draft reads in a step; each longer one has twice as many
    length = 64
    while length <= len(token_ids):
        yield length, hash(tuple(token_ids[:length]))
        length *= 2
