"""Pearson's chi-square test and its power."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from tandem.clients.client import Completed

CellT = TypeVar("CellT", bound=Hashable)

MIN_EXPECTED = 10.0
"""Cells with a smaller expected count are pooled, because the chi-square approximation needs enough counts in each."""

_Z_ONE_IN_10_000 = 3.719
_Z_99_PERCENT = 2.326


def statistic(counts: Counter[CellT], probs: Mapping[CellT, float]) -> tuple[float, int]:
    """Return the chi-square statistic of the counts under these probabilities, and its degrees of freedom."""
    total = counts.total()
    large = {cell: prob * total for cell, prob in probs.items() if prob * total >= MIN_EXPECTED}
    cells = [(counts[cell], expected) for cell, expected in large.items()]
    rest = total - sum(expected for _, expected in cells)
    if rest >= MIN_EXPECTED:
        cells.append((total - sum(count for count, _ in cells), rest))
    return sum((count - expected) ** 2 / expected for count, expected in cells), len(cells) - 1


def critical_value(freedom: int) -> float:
    """Return the value that the statistic exceeds once in 10 000 times if the probabilities are correct.

    Wilson and Hilferty 1931: the cube root of chi-square over its degrees of freedom is nearly normal.
    """
    spread = 2.0 / (9.0 * freedom)
    return freedom * (1.0 - spread + _Z_ONE_IN_10_000 * math.sqrt(spread)) ** 3


def visible_distance(total: int, freedom: int) -> float:
    """Return the total variation distance from which a deviation is detected with a probability above 0.99.

    The statistic of a wrong distribution at distance d is noncentral with at least 4 * total * d^2 (Cauchy-Schwarz).
    """
    low = 0.0
    high = 10.0 * critical_value(freedom)
    for _ in range(60):
        noncentrality = (low + high) / 2.0
        deviation = math.sqrt(2.0 * (freedom + 2.0 * noncentrality))
        if freedom + noncentrality - _Z_99_PERCENT * deviation < critical_value(freedom):
            low = noncentrality
        else:
            high = noncentrality
    return math.sqrt(high / (4.0 * total))


def assert_drawn_from(
    probs: Mapping[tuple[int, ...], float],
    completed: Sequence[Completed],
    places: slice = slice(None),
    distance: float = math.inf,
    *,
    is_alone: bool = False,
) -> None:
    """Fail unless the tokens at these places have this distribution.

    A correct implementation fails with a probability of 1 in 10 000, decided once because the seeds are fixed.

    Args:
        probs: of the first tokens of a completion.
        completed: under seeds of their own.
        places: positions to compare.
        distance: a deviation by this total variation distance must be detected with a probability above 0.99.
        is_alone: the target drafts nothing.
    """
    accepted, drafted = (
        sum(getattr(each.speculation, name) for each in completed) for name in ("accepted", "drafted")
    )
    assert drafted == 0 if is_alone else 0.05 < accepted / drafted < 0.95, (
        "both accepted and recovered tokens"
    )
    expected: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for tokens, mass in probs.items():
        expected[tokens[places]] += mass
    counts = Counter(each.token_ids[places] for each in completed)
    assert set(counts) <= set(expected), "a token without probability was emitted"
    value, freedom = statistic(counts, expected)
    assert value < critical_value(freedom)
    assert visible_distance(len(completed), freedom) < distance
