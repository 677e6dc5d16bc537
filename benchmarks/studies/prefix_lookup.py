"""How long it takes to find a prompt's prefix among many and to take its pages over.

    python -m benchmarks.studies.prefix_lookup

Only the bookkeeping is real: the arena has one layer with one number for each token.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Iterator

import torch

from tandem.engine.kv_cache.arena import KvArena, LayerGeometry, PageTable, page_tokens_on, pages_for
from tandem.engine.kv_cache.paged_cache import PagedCache
from tandem.engine.kv_cache.sequence import Sequence
from tandem.types import Delta

PREFIXES = 1_000
TOKENS = 4_096
ROUNDS = 300
VOCABULARY_SIZE = 128_256


class Lookup:
    """A cache that knows many prefixes."""

    def __init__(self, device: torch.device, common_tokens: int) -> None:
        """
        Args:
            device: whose pages are used: of 64 tokens on a CPU, of 256 elsewhere.
            common_tokens: with how many tokens all of the prefixes begin alike.
        """
        generator = random.Random(0)

        def text(count: int) -> list[int]:
            return [generator.randrange(VOCABULARY_SIZE) for _ in range(count)]

        common = text(common_tokens)
        self._prefixes = [common + text(TOKENS - common_tokens) for _ in range(PREFIXES)]
        size = page_tokens_on(device)
        count = PREFIXES * pages_for(TOKENS + 1, size) + 2
        self.page_tokens = size
        self._cache = PagedCache(KvArena([LayerGeometry(1, 1, 1)], count, torch.float32, device))
        for prefix in self._prefixes:
            sequence = self._sequence(prefix)
            self._cache.reuse(sequence, 1)
            if not self._cache.make_ready(sequence, TOKENS + 1):
                raise RuntimeError("the arena has room for all")
            sequence.advance(sequence.pending_count)
            self._cache.computed(sequence)
            self._cache.release(sequence)

    def _sequence(self, prefix: list[int]) -> Sequence:
        sequence = Sequence(PageTable(self.page_tokens, TOKENS + 1), TOKENS + 1, VOCABULARY_SIZE)
        sequence.apply(Delta(0, [*prefix, 5]))
        return sequence

    def microseconds(self) -> Iterator[float]:
        """Time that each of some lookups takes."""
        generator = random.Random(1)
        for _ in range(ROUNDS):
            sequence = self._sequence(generator.choice(self._prefixes))
            began = time.perf_counter()
            self._cache.reuse(sequence, 1)
            yield (time.perf_counter() - began) * 1e6
            if sequence.computed_length != TOKENS:
                raise RuntimeError(f"{sequence.computed_length} of {TOKENS} tokens were found")
            self._cache.release(sequence)


def main() -> None:
    """Prints the fastest lookup and the median."""
    for device in (torch.device("cpu"), torch.device("meta")):
        for common_tokens in (0, TOKENS // 2):
            lookup = Lookup(device, common_tokens)
            found = list(lookup.microseconds())
            sys.stdout.write(
                f"pages of {lookup.page_tokens} tokens, {PREFIXES:,} prefixes of {TOKENS:,} tokens with "
                f"{common_tokens:,} in common: {min(found):.0f} us at least, {statistics.median(found):.0f} at "
                "the median\n"
            )


if __name__ == "__main__":
    main()
