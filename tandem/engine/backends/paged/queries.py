"""Which queries a step has, and where the keys of their sequences lie: what all layers' attention shares."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.engine.backends.paged.pages import PageReader


class PagedQueries:
    """The queries of a step: which sequence each belongs to, and where that sequence's keys lie.

    A sequence's queries are its last positions. Nothing here is looked at on the host, so a captured graph may hold it.
    """

    def __init__(
        self,
        page_table: Tensor,
        query_starts: Tensor,
        lengths: Tensor,
        max_queries: int,
        max_length: int,
        query_counts: Tensor | None = None,
    ) -> None:
        """
        Args:
            page_table: [sequences, max_pages], int32. Numbers behind a sequence's end may be those of any page.
            query_starts: [sequences + 1], int32, where the queries of each sequence begin among all.
            lengths: [sequences], int32, keys of each sequence, its queries' own included. The queries of a sequence of
                length 0 are padding.
            max_queries: the most that a sequence has.
            max_length: no sequence is longer.
            query_counts: [sequences], int32, how many of the queries are the sequence's; those that follow are padding.
                None if all are.
        """
        self.page_table = page_table
        self.query_starts = query_starts
        self.lengths = lengths
        self.max_queries = max_queries
        self.max_length = max_length
        self.query_counts = query_counts
        self._reader = PageReader(page_table)
        self._masks: dict[tuple[int | None, int, torch.dtype], Tensor] = {}
        self._varlen: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    @property
    def for_varlen(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Page table, query starts, lengths and key starts with padding in sequences of its own, which have no keys.

        `varlen_attn` takes a sequence's queries for its last positions. It gives zeros where there is no key.
        """
        if self._varlen is None:
            table, starts, lengths = self.page_table, self.query_starts, self.lengths
            if self.query_counts is not None:
                starts = torch.stack((starts[:-1], starts[:-1] + self.query_counts), dim=1).flatten()
                starts = torch.cat((starts, self.query_starts[-1:]))
                lengths = torch.stack((lengths, torch.zeros_like(lengths)), dim=1).flatten()
                table = table[:, None].expand(-1, 2, -1).flatten(0, 1)
            ends = lengths.cumsum(0, dtype=torch.int32)
            self._varlen = table, starts, lengths, torch.cat((torch.zeros_like(ends[:1]), ends))
        return self._varlen

    def blocks(self, query: Tensor) -> Tensor:
        """The queries of each sequence, [sequences, max_queries, heads, dim]; behind the last of one, any others."""
        sequences, width = self.lengths.shape[0], self.max_queries
        if query.shape[0] == sequences * width:
            return query.view(sequences, width, *query.shape[1:])
        offsets = torch.arange(width, device=query.device)
        rows = (self.query_starts[:-1, None] + offsets).clamp(max=query.shape[0] - 1)
        return query[rows]

    def unblocked(self, blocks: Tensor, token_count: int) -> Tensor:
        """The reverse of `blocks`; zeros for queries of no sequence."""
        if token_count == blocks.shape[0] * blocks.shape[1]:
            return blocks.flatten(0, 1)
        tokens = torch.arange(token_count, dtype=torch.int32, device=blocks.device)
        sequences = torch.searchsorted(self.query_starts[1:], tokens, right=True)
        is_covered = sequences < blocks.shape[0]
        sequences = sequences.clamp(max=blocks.shape[0] - 1)
        found = blocks[sequences, tokens - self.query_starts[sequences]]
        return found.masked_fill(~is_covered[:, None, None], 0.0)

    def gathered(self, storage: Tensor) -> Tensor:
        """Keys or values of the whole page table with zeros behind each sequence's end, [sequences, kv_heads, L, dim].

        A mask would hide what is there, but not a NaN: hiding is arithmetic.
        """
        found = self._reader.read(storage)
        is_behind = torch.arange(found.shape[2], device=found.device) >= self.lengths[:, None]
        return found.masked_fill_(is_behind[:, None, :, None], 0.0)

    def mask(self, window: int | None, repeats: int, dtype: torch.dtype, length: int) -> Tensor:
        """Zero where a query sees a key and minus infinity elsewhere, [sequences, 1, repeats * max_queries, length].

        Padding sees at least one of its sequence's keys or zeros, so that its results are numbers.
        """
        found = self._masks.get((window, repeats, dtype))
        if found is None:
            keys = torch.arange(length, device=self.lengths.device)
            counts = self.query_starts.diff() if self.query_counts is None else self.query_counts
            offsets = torch.arange(self.max_queries, device=keys.device)
            queries = ((self.lengths - counts)[:, None] + offsets).clamp(0, length - 1)[:, None, :, None]
            hidden = keys > queries
            if window is not None:
                hidden = hidden | (keys <= queries - window)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=keys.device)
            mask = mask.masked_fill(hidden, float("-inf"))
            found = self._masks[window, repeats, dtype] = mask.repeat(1, 1, repeats, 1)
        return found
