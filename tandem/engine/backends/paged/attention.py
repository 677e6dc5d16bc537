"""Attention of a step's queries to keys and values in pages: one call for any mix of prefill, verify and decode.

The contract is that of `torch.nn.attention.varlen.varlen_attn` with a block table, and on CUDA that function runs.
Plain torch stands in where it cannot: on other devices, for float32, score caps and attention sinks, and for heads of
more than 256 numbers.
"""

from __future__ import annotations

from torch import Tensor

from tandem.engine.backends.paged.plain import plain_attention
from tandem.engine.backends.paged.queries import PagedQueries
from tandem.engine.backends.paged.varlen import varlen_attention, varlen_for


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    queries: PagedQueries,
    *,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Each query attends to the keys of its sequence up to its own position.

    Args:
        query: [tokens, heads, key_dim]
        keys: [pages, page_tokens, kv_heads, key_dim]; the queries' own are there already.
        values: [pages, page_tokens, kv_heads, value_dim]
        queries: whose queries they are.
        window: positions that a query sees, its own included; None for all.
        scale: factor on the scores; None for key_dim ** -0.5.
        softcap: bound of the scores, None for none.
        sinks: [heads], a score that takes part in the softmax and attends to nothing; None for none.

    Returns:
        [tokens, heads, value_dim], finite for padding if the keys and values of its sequence are.
    """
    varlen = None if softcap is not None or sinks is not None else varlen_for(keys, values)
    if varlen is None:
        return plain_attention(query, keys, values, queries, window, scale, softcap, sinks)
    return varlen_attention(varlen, query, keys, values, queries, window, scale)
