"""Attention of a step's queries to keys and values in pages: one call for any mix of prefill, verify and decode.

The contract is that of `torch.nn.attention.varlen.varlen_attn` with a block table, and on CUDA that function runs.
Plain torch stands in where it cannot: on other devices, for float32, score caps and attention sinks, and for heads of
more than 256 numbers.
"""

from __future__ import annotations

from torch import Tensor

from tandem.engine.backends.paged.plain import plain_attention
from tandem.engine.backends.paged.queries import PagedQueries
from tandem.engine.backends.paged.scoring import Scoring
from tandem.engine.backends.paged.varlen import varlen_attention, varlen_for
from tandem.engine.kv_cache.arena import LayerCache


def paged_attention(query: Tensor, layer: LayerCache, queries: PagedQueries, scoring: Scoring) -> Tensor:
    """Each query attends to the keys of its sequence up to its own position.

    Args:
        query: [tokens, heads, key_dim]
        layer: keys and values of the layer; the queries' own are there already.
        queries: whose queries they are, by the page tables of the layer's group.
        scoring: of the layer.

    Returns:
        [tokens, heads, value_dim], finite for padding if the keys and values of its sequence are.
    """
    varlen = varlen_for(layer.keys, layer.padded_values) if scoring.is_usual else None
    if varlen is None:
        return plain_attention(query, layer.keys, layer.values, queries, scoring)
    output = varlen_attention(varlen, query, layer.keys, layer.padded_values, queries, scoring)
    return output[..., : layer.values.shape[-1]]
