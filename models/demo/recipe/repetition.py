"""Measures how much a text repeats itself, in n-grams of tokens.

A text loops when some 8-gram occurs three times in it. Source code repeats shorter ones rightly: the end of a line, an
indentation and `self.` are four tokens.
"""

from collections import Counter
from collections.abc import Sequence

LOOP_NGRAM = 8
LOOP_COUNT = 3
REPEATED_NGRAM = 4


def loops(tokens: Sequence[int]) -> bool:
    """True if some 8-gram occurs three times, overlapping occurrences counted."""
    counts = Counter(_ngrams(tokens, LOOP_NGRAM))
    return max(counts.values(), default=0) >= LOOP_COUNT


def repeated_share(tokens: Sequence[int], size: int = REPEATED_NGRAM) -> float:
    """The share of n-grams that occurred before: 1 - distinct / all (Welleck et al. 2019, seq-rep-n)."""
    ngrams = _ngrams(tokens, size)
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def _ngrams(tokens: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)]
