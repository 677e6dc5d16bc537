"""Groups of layers that keep the same tokens. A sequence has a page table for each group of its model.

Layers with a sliding window read nothing before it, so their pages from before it are given back. As in vLLM's hybrid
KV cache, groups have the same number of layers and share one pool: a page holds some tokens of all layers of one group,
so a page that one group gives back serves any other. A model whose layers all keep the same has one group.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from tandem.engine.kv_cache.page_table import first_kept_page, most_kept_pages, pages_for

_MOST_GROUPS = 8
"""About as many at most: a layer more in each group costs some memory, a group more costs a page table in each step."""


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """Geometry of one attention layer: what it stores per token, and its window."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    """Number of positions, its own included, that a token attends to; None for all before it."""

    @property
    def values_per_token(self) -> int:
        """Numbers stored for each token."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose keys and values of the same tokens lie in one page."""

    window: int | None
    """Number of positions that a token attends to in these layers; None if they keep all tokens."""
    layers: tuple[int, ...]
    """Their indices in the model."""


def group_layers(layers: SequenceOf[LayerGeometry]) -> tuple[LayerGroup, ...]:
    """The groups of a model, those that keep all tokens first.

    Each has as many layers as there are of the rarest window. The last one of a window may have fewer; what it lacks
    is empty in its pages. Layers of different shapes would need pages of different sizes, so they form one group that
    keeps all tokens.
    """
    shapes = {(layer.kv_heads, layer.key_dim, layer.value_dim) for layer in layers}
    by_window: dict[int | None, list[int]] = {}
    for index, layer in enumerate(layers):
        by_window.setdefault(layer.window if len(shapes) == 1 else None, []).append(index)
    size = max(min(map(len, by_window.values())), -(-len(layers) // _MOST_GROUPS))
    return tuple(
        LayerGroup(window, tuple(indices[first : first + size]))
        for window, indices in sorted(by_window.items(), key=lambda item: (item[0] is not None, item[0] or 0))
        for first in range(0, len(indices), size)
    )


def kept_pages(windows: Iterable[int | None], start: int, end: int, page_tokens: int) -> int:
    """Pages of a sequence with `start` computed tokens and room for `end`, in groups with these windows."""
    return sum(
        pages_for(end, page_tokens) - first_kept_page(start, window, page_tokens) for window in windows
    )


def most_pages(windows: Iterable[int | None], length: int, step_tokens: int, page_tokens: int) -> int:
    """The most pages that a sequence has on its way to a length, in steps of up to `step_tokens`."""
    return sum(most_kept_pages(length, step_tokens, window, page_tokens) for window in windows)
