"""Beginnings of texts are remembered by the draft that has read them, the longest one counts, and old ones go."""

from __future__ import annotations

from coordinator.replicas import pool
from coordinator.replicas.pool import Prefixes


def test_the_longest_known_beginning_counts() -> None:
    held = Prefixes()
    held.add("a", range(300))
    held.add("b", [*range(100), *range(500, 700)])
    assert held.held(range(300)) == {"b": 64, "a": 256}
    assert held.held([*range(100), *range(500, 700)]) == {"b": 256}
    assert held.held(range(63)) == {}
    assert held.held(range(1, 300)) == {}


def test_old_beginnings_go() -> None:
    held = Prefixes()
    for first in range(pool._MAX_PREFIXES + 1):
        held.add("a", range(first, first + 64))
    assert held.held(range(64)) == {}
    assert held.held(range(1, 65)) == {"a": 64}
