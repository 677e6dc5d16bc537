"""Attention to pages by torch's basic operations, on any device."""

from __future__ import annotations

from torch import Tensor

from tandem.engine.backends.paged.queries import PagedQueries
from tandem.engine.models.attention import grouped_attention


def plain_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    queries: PagedQueries,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """See `paged_attention`. It reads the whole page table, whatever the lengths, so all shapes are static."""
    blocks = queries.blocks(query).transpose(1, 2)
    count, heads, width, _ = blocks.shape
    kv_heads = keys.shape[2]
    repeats = heads // kv_heads
    found_keys, found_values = queries.gathered(keys), queries.gathered(values)
    if sinks is not None:
        sinks = sinks.view(kv_heads, repeats).repeat_interleave(width, dim=1)
    output = grouped_attention(
        blocks.reshape(count, kv_heads, repeats * width, -1),
        found_keys,
        found_values,
        mask=queries.mask(window, repeats, found_keys.dtype, found_keys.shape[2]),
        is_causal=False,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
    )
    return queries.unblocked(output.reshape(count, heads, width, -1).transpose(1, 2), query.shape[0])
