"""Who runs when: in turn within a round, and nobody always first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

ItemT = TypeVar("ItemT")


def rotated(items: Sequence[ItemT], round_index: int) -> list[ItemT]:
    """The items, begun with another one each round, so that what a run leaves behind falls on all alike."""
    if not items:
        return []
    start = round_index % len(items)
    return [*items[start:], *items[:start]]


def chosen(items: Sequence[ItemT], count: int, round_index: int) -> tuple[ItemT, ...]:
    """The round's `count` items: the next ones each round, from the first again after the last."""
    return tuple(items[(round_index * count + index) % len(items)] for index in range(count))
