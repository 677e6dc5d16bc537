"""The KV arena: keys and values of every sequence in pages, allocated once; how large it may be, and how a step writes
and reads them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from tandem.config.speculative import MAX_CONFIGURED_TOKENS
from tandem.engine.interface import EngineSettings
from tandem.errors import ConfigurationError

ROLLBACK_TOKENS = MAX_CONFIGURED_TOKENS + 8
"""Layers with a window keep so many tokens more than the next one sees: the longest proposal, and a few that come with
it. A sequence that rolls back further is computed again."""


def pages_for(tokens: int, page_tokens: int) -> int:
    """Number of pages that hold `tokens` tokens."""
    return -(-tokens // page_tokens)


class PageTable:
    """The pages of one sequence in one group of layers, first positions first. The numbers, int64, stay at one address,
    so that a kernel is told the address alone."""

    __slots__ = ("_count", "_numbers", "address", "first", "page_tokens", "window")

    def __init__(
        self, page_tokens: int, max_tokens: int, pages: Iterable[int] = (), window: int | None = None
    ) -> None:
        self.page_tokens = page_tokens
        self.window = window
        self._numbers = np.zeros(pages_for(max_tokens, page_tokens), dtype=np.int64)
        self.address: int = self._numbers.ctypes.data
        self.first = 0
        """Index of the first page that it holds. Numbers before it are those of any pages."""
        self._count = 0
        self.extend(pages)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        if not self.first <= index < self._count:
            raise IndexError(f"page {index} of {self.first} to {self._count}")
        return int(self._numbers[index])

    @property
    def capacity(self) -> int:
        """Tokens of the sequence, from its first one on, that have a place or had one."""
        return self._count * self.page_tokens

    @property
    def max_tokens(self) -> int:
        return len(self._numbers) * self.page_tokens

    @property
    def pages(self) -> list[int]:
        """The pages in order, with any numbers before the first that it holds."""
        return cast("list[int]", self._numbers[: self._count].tolist())

    @property
    def held_pages(self) -> list[int]:
        return self.pages[self.first :]

    @property
    def shortest_length(self) -> int:
        """The fewest computed tokens after which the next one sees pages that the table holds, and no others."""
        if not self.first or self.window is None:
            return 0
        return self.first * self.page_tokens + self.window - 1

    def first_seen(self, length: int) -> int:
        """Index of the first page that the token after `length` others sees."""
        return 0 if self.window is None else max(0, length - self.window + 1) // self.page_tokens

    def first_kept(self, length: int) -> int:
        """Index of the first page to keep after `length` computed tokens, so that the sequence may roll back."""
        return self.first_seen(length - ROLLBACK_TOKENS)

    def extend(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._numbers[self._count] = page
            self._count += 1

    def replace(self, index: int, page: int) -> None:
        self._numbers[index] = page

    def shorten(self, count: int) -> list[int]:
        """Keeps the first `count` pages and returns the others that it held, last first."""
        removed = self.pages[max(count, self.first) :][::-1]
        self._count = min(self._count, count)
        self.first = min(self.first, count)
        return removed

    def drop_before(self, index: int) -> list[int]:
        """Keeps the pages from `index` on and returns the others that it held. There need be none from there on."""
        if index <= self.first:
            return []
        removed = self.pages[self.first : index]
        self.first = index
        self._count = max(self._count, index)
        return removed

    def slots(self, start: int, end: int) -> np.ndarray:
        """Slots of the positions from `start` up to `end`: page times `page_tokens` plus offset, int64."""
        return self.slots_of(np.arange(start, end))

    def slots_of(self, positions: np.ndarray) -> np.ndarray:
        pages, offsets = np.divmod(positions, self.page_tokens)
        return self._numbers[pages] * self.page_tokens + offsets


Span = tuple[PageTable, int, int]
"""The positions of a sequence from the first number up to the second."""


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """Geometry of one attention layer."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    """Number of positions, its own included, that a token attends to; None for all before it."""

    @property
    def values_per_token(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


class LayerGroup(NamedTuple):
    """Layers whose keys and values of the same tokens lie in one page, all with this window."""

    window: int | None
    layers: tuple[int, ...]


def group_layers(layers: SequenceOf[LayerGeometry]) -> tuple[LayerGroup, ...]:
    """The groups of a model, those that keep all tokens first.

    Each has as many layers as there are of the rarest window; the last one of a window may have fewer. Layers of
    different shapes would need pages of different sizes, so they form one group that keeps all tokens.
    """
    shapes = {(layer.kv_heads, layer.key_dim, layer.value_dim) for layer in layers}
    by_window: dict[int | None, list[int]] = {}
    for index, layer in enumerate(layers):
        by_window.setdefault(layer.window if len(shapes) == 1 else None, []).append(index)
    # About eight groups at most: another one costs a page table in each step, a larger one some memory
    size = max(min(map(len, by_window.values())), -(-len(layers) // 8))
    return tuple(
        LayerGroup(window, tuple(indices[first : first + size]))
        for window, indices in sorted(by_window.items(), key=lambda item: (item[0] is not None, item[0] or 0))
        for first in range(0, len(indices), size)
    )


def most_pages(windows: Iterable[int | None], length: int, step_tokens: int, page_tokens: int) -> int:
    """The most pages that a sequence has on its way to a length, in steps of up to `step_tokens`."""

    def most(window: int | None) -> int:
        if window is None:
            return pages_for(length, page_tokens)
        kept = window - 1 + ROLLBACK_TOKENS + step_tokens  # wherever in its page the first one lies
        return min(pages_for(length, page_tokens), pages_for(kept - 1, page_tokens) + 1)

    return sum(map(most, windows))


logger = logging.getLogger(__name__)

_CGROUP_MEMORY_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def memory_allowance(utilization: float | None, device: torch.device) -> int:
    """Bytes that the KV cache may take, now that the weights are loaded; 0 or less when there is no room for it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading no longer needs
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device)
        share = 0.9 if utilization is None else utilization  # as in vLLM and MAX
        allowed = accelerator_allowance(total, free, own, share)
        if allowed < (promised := int(total * share) - own):
            found = {
                "device": str(device),
                "utilization": share,
                "promised_bytes": promised,
                "free_bytes": free,
            }
            logger.warning(
                "less memory is free than device_memory_utilization leaves for the KV cache", extra=found
            )
        return allowed
    share = 0.3 if utilization is None else utilization  # everything else on the machine needs memory, too
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    # The memory limit of the container, which the machine's own figure does not show
    for path in _CGROUP_MEMORY_LIMITS:
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            total = min(total, int(text))
    statm = Path("/proc/self/statm")
    resident = int(statm.read_text().split()[1]) * page if statm.is_file() else 0
    return int(total * share) - resident


def accelerator_allowance(total: int, free: int, own: int, share: float) -> int:
    """Bytes for the KV cache of a process that may hold a share of an accelerator's total memory, and holds its own
    bytes already; free is what no process holds at the moment."""
    # A margin, because other processes' use changes from moment to moment
    return min(int(total * share) - own, free - (256 << 20))


PAGE_TOKENS = 64
"""A multiple of the CPU kernels' vectors. Smaller pages share more of a prefix; attention looks up each page once."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's part of the arena."""

    keys: Tensor
    """[pages, page_tokens, kv_heads, key_dim]; the numbers of one head in one page are one contiguous matrix."""
    values: Tensor
    """[pages, page_tokens, kv_heads, value_dim], likewise."""
    group: int = 0
    """Index of the page table that a sequence has for this layer."""
    window: int | None = None


@dataclass(eq=False)
class CacheShape:
    """How a KV cache is divided into pages."""

    page_tokens: int
    page_count: int
    group_count: int
    """Groups of layers: a sequence takes a page for each at a time."""
    windows: tuple[int | None, ...]
    """The window of each page table that sequences have; None for those that see all, which come first."""

    def tables(self, max_tokens: int) -> list[PageTable]:
        return [PageTable(self.page_tokens, max_tokens, window=window) for window in self.windows]


class KvArena(CacheShape):
    """Keys and values. A page holds tokens of the layers of one group: the n-th layers of all groups share a tensor."""

    def __init__(
        self, layers: SequenceOf[LayerGeometry], page_count: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        groups = group_layers(layers)
        super().__init__(PAGE_TOKENS, page_count, len(groups), tuple(group.window for group in groups))

        def states(heads: int, dim: int) -> Tensor:
            storage = torch.empty(page_count, heads, PAGE_TOKENS, dim, dtype=dtype, device=device)
            return storage.transpose(1, 2)

        shapes = [layers[index] for index in max((group.layers for group in groups), key=len)]
        self.storages = tuple(
            LayerCache(states(shape.kv_heads, shape.key_dim), states(shape.kv_heads, shape.value_dim))
            for shape in shapes
        )
        by_index = {
            index: replace(storage, group=number, window=layers[index].window)
            for number, group in enumerate(groups)
            for index, storage in zip(group.layers, self.storages, strict=False)
        }
        self.layers = tuple(by_index[index] for index in range(len(layers)))

    def zero(self, tables: Iterable[PageTable], start: int, end: int) -> None:
        """Clears a sequence's positions from `start` up to `end` in every layer."""
        for table in tables:
            pages, places = np.divmod(table.slots(start, end), self.page_tokens)
            for storage in self.storages:
                storage.keys[pages, places] = 0
                storage.values[pages, places] = 0

    def copy(self, source: int, target: int, count: int) -> None:
        """Copies the first `count` tokens of the page `source` to the page `target`, for all layers of a group."""
        for storage in self.storages:
            storage.keys[target, :count] = storage.keys[source, :count]
            storage.values[target, :count] = storage.values[source, :count]

    def move(self, tables: Iterable[PageTable], positions: SequenceOf[int], target: int) -> None:
        """Copies a sequence's tokens at some positions to those from `target` on, in every layer. They may overlap."""
        size = self.page_tokens
        both = np.stack((np.array(positions), np.arange(target, target + len(positions))))
        for table in tables:
            slots = table.slots_of(both)
            # One copy to the device for all four.
            (from_pages, to_pages), (from_places, to_places) = torch.from_numpy(
                np.stack((slots // size, slots % size))
            ).to(self.storages[0].keys.device)
            for storage in self.storages:
                for numbers in (storage.keys, storage.values):
                    numbers[to_pages, to_places] = numbers[from_pages, from_places]


def arena_pages(
    layers: SequenceOf[LayerGeometry],
    settings: EngineSettings,
    max_length: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Number of pages of the arena."""
    windows = [group.window for group in group_layers(layers)]
    page_bytes = bytes_of_page(layers, dtype)
    step_tokens = max(settings.prefill_chunk_tokens, ROLLBACK_TOKENS)
    longest = most_pages(windows, max_length, step_tokens, PAGE_TOKENS)
    allowed_bytes = settings.kv_cache_bytes
    if allowed_bytes is None:
        allowed_bytes = memory_allowance(settings.device_memory_utilization, device)
    count = min(longest * settings.max_sequences, allowed_bytes // page_bytes)
    if count < longest:
        raise ConfigurationError(
            f"The KV cache may take {max(allowed_bytes, 0)} bytes, but one sequence of max_length {max_length} needs "
            f"{longest * page_bytes}; give it more memory or lower max_length."
        )
    tokens = count * PAGE_TOKENS // len(windows)
    logger.info("kv cache sized", extra={"tokens": tokens, "bytes": count * page_bytes})
    return count


def bytes_of_page(layers: SequenceOf[LayerGeometry], dtype: torch.dtype) -> int:
    """Bytes of a page's keys and values, in all layers of a group."""
    largest = max((group.layers for group in group_layers(layers)), key=len)
    return PAGE_TOKENS * sum(layers[index].values_per_token for index in largest) * dtype.itemsize


class PageWriter:
    """Writes the tokens of a step to their places, in every layer of a group."""

    def __init__(self, spans: SequenceOf[Span], device: torch.device) -> None:
        slots = np.concatenate([table.slots(start, end) for table, start, end in spans])
        places = np.stack(np.divmod(slots, spans[0][0].page_tokens))
        self._pages, self._offsets = torch.from_numpy(places).to(device)  # one copy for both

    def write(self, layer: LayerCache, key: Tensor, value: Tensor) -> None:
        """Stores keys and values, [1, kv_heads, tokens, dim] with the tokens of the spans in order."""
        for storage, states in ((layer.keys, key), (layer.values, value)):
            storage[self._pages, self._offsets] = states[0].transpose(0, 1)


class PageReader:
    """Reads the pages of sequences that hold positions from `start` up to `end`, the same ones in every layer. One that
    ends earlier is read on in its last page, whose numbers are its own or hidden anyway."""

    def __init__(self, tables: SequenceOf[PageTable], start: int, end: int, device: torch.device) -> None:
        size = tables[0].page_tokens
        first = start // size
        count = pages_for(end, size)
        lists = [table.pages[first:count] or table.pages[-1:] for table in tables]
        padded = [pages + pages[-1:] * (count - first - len(pages)) for pages in lists]
        self._pages = torch.tensor(padded, device=device)
        self._rows: dict[int, Tensor] = {}

    def read(self, storage: Tensor) -> Tensor:
        """A copy of keys or values, [sequences, kv_heads, pages * page_tokens, dim]."""
        _, page_tokens, heads, dim = storage.shape
        sequences, count = self._pages.shape
        # One head's numbers in one page are one row, so that a single copy puts them in order.
        rows = self._rows.get(heads)
        if rows is None:
            numbers = torch.arange(heads, device=self._pages.device)
            rows = self._rows[heads] = (self._pages[:, None] * heads + numbers[None, :, None]).flatten()
        found = storage.transpose(1, 2).view(-1, page_tokens * dim).index_select(0, rows)
        return found.view(sequences, heads, count * page_tokens, dim)
