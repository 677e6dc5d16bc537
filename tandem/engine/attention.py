"""The attention function that transformers' models call in place of their own.

A step packs tokens of many sequences into one row, so every layer but attention sees one long batch without padding.
Attention is where sequences must be told apart. transformers hands extra keyword arguments of ``model.forward`` down to
its attention function, and that is how the step travels: whatever it is, it stores this step's keys and values and
attends for each sequence to what belongs to it. Models need no cache object and build no mask.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION_NAME = "tandem"
STEP_ARGUMENT = "tandem_step"


class UnsupportedAttentionError(Exception):
    """A model asks of attention what the packed form cannot give; never leaves the engine."""


class AttentionStep(Protocol):
    """One forward pass, as its attention layers see it."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Stores this step's keys and values and attends.

        Args:
            module: the calling layer; its `layer_idx` tells which.
            query: [1, heads, step_tokens, key_dim]
            key: [1, kv_heads, step_tokens, key_dim]
            value: [1, kv_heads, step_tokens, value_dim]
            scale: factor on the scores; None for key_dim ** -0.5.
            window: positions that a token attends to, its own included; None for all before it.
            softcap: scores become softcap * tanh(scores / softcap).
            sinks: [heads], a score that takes part in the softmax and attends to nothing.

        Returns:
            [1, step_tokens, heads, value_dim]
        """
        ...


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    tandem_step: AttentionStep | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """What transformers calls; the signature is its own."""
    if tandem_step is None:
        raise UnsupportedAttentionError("the model does not pass keyword arguments down to attention")
    if attention_mask is not None or position_bias is not None:
        raise UnsupportedAttentionError("the model brings a mask or a position bias of its own")
    output = tandem_step.attend(
        module, query, key, value, scale=scaling, window=sliding_window, softcap=softcap, sinks=s_aux
    )
    return output, None


def grouped_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of equally wide blocks of queries, each to its own keys.

    Args:
        query: [batch, kv_heads, repeats * width, key_dim]: query heads that share a KV head are rows of one matrix, so
            that grouped-query attention needs no copy of the keys. When `is_causal`, [batch, heads, width, key_dim].
        keys: [batch, kv_heads, length, key_dim]
        values: [batch, kv_heads, length, value_dim]
        mask: added to the scores, [batch or 1, 1, repeats * width, length]; None when every key is seen.
        is_causal: query i sees the keys up to i; there is then no mask.
        scale: factor on the scores; None for key_dim ** -0.5.
        softcap: bound of the scores, None for none.
        sinks: [kv_heads, repeats * width], None for none.

    Returns:
        Like `query`, with value_dim in the last place.
    """
    if softcap is None and sinks is None:
        return nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=is_causal
        )
    scores = torch.matmul(query, keys.transpose(-1, -2)) * (scale or query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks[None, :, :, None].expand(scores.shape[0], -1, -1, -1).to(scores.dtype)
        scores = torch.cat((scores, column), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    return torch.matmul(weights[..., : keys.shape[-2]], values)


AttentionInterface.register(ATTENTION_NAME, attention_forward)
