"""Which queries a step has, and where the keys of their sequences lie: what all layers' attention shares."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tandem.engine.kv_cache.arena import pages_for
from tandem.engine.kv_cache.sequence import Segment


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Some pages of each sequence."""

    pages: Tensor
    """[sequences, pages], integers."""
    hidden: Tensor
    """Which keys each query does not see, bool [sequences, pages, 1, 1, max_queries, page_tokens]."""
    unseen: Tensor
    """Which keys no query of the sequence sees, bool [sequences, pages, 1, page_tokens, 1]. They may be those of
    others."""

    def read(self, keys: Tensor) -> Tensor:
        """A copy of the keys, [sequences, pages, kv_heads, page_tokens, dim]."""
        found = keys.transpose(1, 2).index_select(0, self.pages.flatten())
        return found.view(*self.pages.shape, *found.shape[1:])

    def read_values(self, values: Tensor) -> Tensor:
        """A copy of the values, with zeros where no query sees: a weight of zero would not hide a NaN."""
        return self.read(values).masked_fill_(self.unseen, 0.0)


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
            page_table: [sequences, max_pages], int32. Numbers behind a sequence's end, and before what its queries see
                in layers with a window, may be those of any page.
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
        self._parts: dict[tuple[int | None, int], list[Part]] = {}
        self._varlen: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    @classmethod
    def of_segments(cls, segments: SequenceOf[Segment], group: int, device: torch.device) -> PagedQueries:
        """The queries of the tokens that the segments run, for the layers of a group."""
        counts = [segment.token_count for segment in segments]
        tables = [segment.sequence.tables[group].pages for segment in segments]
        width = max(map(len, tables))
        numbers = [page for pages in tables for page in pages + pages[-1:] * (width - len(pages))]
        lengths = [segment.end for segment in segments]
        # One copy to the device for all.
        packed = torch.tensor(
            [*numbers, *accumulate(counts, initial=0), *lengths], dtype=torch.int32, device=device
        )
        table, starts, ends = torch.split(packed, [len(numbers), len(counts) + 1, len(counts)])
        return cls(table.view(-1, width), starts, ends, max(counts), max(lengths))

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

    def parts(self, window: int | None, page_count: int, page_tokens: int) -> list[Part]:
        """The pages that any of the queries may see, up to `page_count` of each sequence at a time.

        Args:
            window: positions that a query sees, its own included; None for all.
            page_count: pages of a sequence in a part.
            page_tokens: tokens of a page.
        """
        found = self._parts.get((window, page_count))
        if found is None:
            found = self._parts[window, page_count] = self._made_parts(window, page_count, page_tokens)
        return found

    def _made_parts(self, window: int | None, page_count: int, page_tokens: int) -> list[Part]:
        table, device = self.page_table, self.page_table.device
        max_pages = table.shape[1]
        counts = self.query_starts.diff() if self.query_counts is None else self.query_counts
        starts = self.lengths - counts
        firsts = torch.zeros_like(starts) if window is None else (starts - window + 1).clamp(min=0)
        columns = torch.arange(max_pages, device=device)[None]
        if window is not None:
            # The queries see so many positions in a row, wherever in its page the first one lies.
            seen = window - 1 + self.max_queries
            columns = columns[:, : pages_for(seen - 1, page_tokens) + 1] + (firsts // page_tokens)[:, None]
            table = table.gather(1, columns.clamp(max=max_pages - 1))
        queries = (starts[:, None] + torch.arange(self.max_queries, device=device))[:, None, :, None]
        ends, firsts = self.lengths[:, None, None, None], firsts[:, None, None, None]
        parts = []
        for own, pages in zip(
            torch.split(columns, page_count, 1), torch.split(table, page_count, 1), strict=True
        ):
            keys = (own[..., None] * page_tokens + torch.arange(page_tokens, device=device))[:, :, None]
            unseen = (keys >= ends) | (keys < firsts)
            hidden = unseen | (keys > queries)
            if window is not None:
                hidden |= keys <= queries - window
            parts.append(Part(pages, hidden[:, :, None, None], unseen[..., None]))
        return parts
