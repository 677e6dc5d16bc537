"""The order of contenders: in turn within a round, with another one first in each round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

ItemT = TypeVar("ItemT")


def rotated(items: Sequence[ItemT], round_index: int) -> list[ItemT]:
    """The items, beginning with another one each round, so that after-effects of a run affect all of them."""
    if not items:
        return []
    start = round_index % len(items)
    return [*items[start:], *items[:start]]


def chosen(items: Sequence[ItemT], count: int, round_index: int) -> tuple[ItemT, ...]:
    """The round's `count` items: the next ones each round, from the first again after the last."""
    return tuple(items[(round_index * count + index) % len(items)] for index in range(count))
