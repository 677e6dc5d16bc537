"""Attention to pages by torch's basic operations, on any device."""

from __future__ import annotations

from torch import Tensor

from tandem.engine.backends.paged.online_softmax import OnlineSoftmax
from tandem.engine.backends.paged.queries import PagedQueries
from tandem.engine.backends.paged.scoring import Scoring

MAX_PART_BYTES = 256 << 20
"""The largest temporary, unless one page of each sequence makes a larger one."""


def plain_attention(
    query: Tensor, keys: Tensor, values: Tensor, queries: PagedQueries, scoring: Scoring
) -> Tensor:
    """See `paged_attention`. It reads some pages of each sequence at a time, as many in all as a sequence may have: all
    shapes are static.

    Args:
        query: [tokens, heads, key_dim]
        keys: [pages, page_tokens, kv_heads, key_dim]
        values: [pages, page_tokens, kv_heads, value_dim]
        queries: whose queries they are.
        scoring: of the layer.

    Returns:
        [tokens, heads, value_dim]
    """
    blocks = queries.blocks(query)
    sequences, width, heads, dim = blocks.shape
    _, page_tokens, kv_heads, _ = keys.shape
    softmax = OnlineSoftmax(blocks, kv_heads, values.shape[3], scoring)
    # Of a page: its keys, its values, their scores, the queries beside them.
    copied = page_tokens * kv_heads * max(keys.shape[3], values.shape[3]) * keys.element_size()
    scored = heads * width * max(page_tokens * 4, dim * keys.element_size())
    page_count = max(1, MAX_PART_BYTES // (sequences * max(copied, scored)))
    for part in queries.parts(scoring.window, page_count, page_tokens):
        softmax.add(part.read(keys), part.read_values(values), part.hidden)
    return queries.unblocked(softmax.result(), query.shape[0])
