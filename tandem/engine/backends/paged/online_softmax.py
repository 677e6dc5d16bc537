"""Attention to some pages at a time: the weights of all keys are never there at once.

The softmax is that of Milakov and Gimelshein 2018 (arXiv 1805.02867): whenever a higher score appears, what was summed
so far shrinks accordingly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.engine.backends.paged.scoring import Scoring


class OnlineSoftmax:
    """The weighted sum of the values that were added so far, for blocks of queries."""

    def __init__(self, query: Tensor, kv_heads: int, value_dim: int, scoring: Scoring) -> None:
        """
        Args:
            query: [sequences, width, heads, key_dim]
            kv_heads: heads of keys and values.
            value_dim: numbers of a value.
            scoring: of the layer; its window is left to `add`.
        """
        sequences, width, heads, dim = query.shape
        self._shape = sequences, kv_heads, heads // kv_heads, width
        self._scoring = scoring
        self._scale = dim**-0.5 if scoring.scale is None else scoring.scale
        # Heads that share a KV head are rows of one matrix, which all pages of a sequence have in common.
        self._query = query.transpose(1, 2).reshape(sequences, 1, kv_heads, -1, dim)
        self._dtype = torch.promote_types(query.dtype, torch.float32)
        rows = (sequences, 1, kv_heads, heads // kv_heads * width, 1)
        if scoring.sinks is None:
            # Not minus infinity, whose difference from itself is no number.
            self._highest = query.new_full(rows, torch.finfo(self._dtype).min, dtype=self._dtype)
            self._total = query.new_zeros(rows, dtype=self._dtype)
        else:
            # A score that takes part and has no value.
            sinks = scoring.sinks.view(kv_heads, -1).repeat_interleave(width, dim=1)
            self._highest = sinks.to(self._dtype)[None, None, ..., None].expand(rows)
            self._total = query.new_ones(rows, dtype=self._dtype)
        self._sum = query.new_zeros((*rows[:-1], value_dim), dtype=self._dtype)

    def add(self, keys: Tensor, values: Tensor, hidden: Tensor) -> None:
        """Attends to more pages.

        Args:
            keys: [sequences, pages, kv_heads, page_tokens, key_dim], any numbers where they are hidden.
            values: [sequences, pages, kv_heads, page_tokens, value_dim], finite.
            hidden: True where a query does not see a key, bool [sequences, pages, 1, 1, width, page_tokens].
        """
        softcap = self._scoring.softcap
        scores = torch.matmul(self._query, keys.transpose(-1, -2)).to(self._dtype).mul_(self._scale)
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        sequences, kv_heads, repeats, width = self._shape
        by_head = scores.view(sequences, -1, kv_heads, repeats, width, scores.shape[-1])
        by_head.masked_fill_(hidden, float("-inf"))
        highest = torch.maximum(self._highest, scores.amax(dim=(1, 4), keepdim=True))
        weights = scores.sub_(highest).exp_()
        shrunk = torch.exp(self._highest - highest)
        self._total = self._total * shrunk + weights.sum(dim=(1, 4), keepdim=True)
        added = torch.matmul(weights.to(values.dtype), values)
        self._sum = self._sum * shrunk + added.sum(dim=1, keepdim=True, dtype=self._dtype)
        self._highest = highest

    def result(self) -> Tensor:
        """[sequences, width, heads, value_dim] in the queries' dtype; zeros for queries that saw no key."""
        sequences, _, _, width = self._shape
        output = self._sum / self._total.clamp(min=torch.finfo(self._dtype).tiny)
        return output.to(self._query.dtype).view(sequences, -1, width, output.shape[-1]).transpose(1, 2)
