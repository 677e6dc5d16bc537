"""Parts that EAGLE's and EAGLE-3's layers have in common: those of a Llama layer, for pairs of several sequences."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tandem.engine.models.attention import attention_forward
from tandem.engine.models.heads.target import text_config
from tandem.engine.models.loading import LoadedModel


class LayerShape(Protocol):
    """Numbers of a head's config that its layer needs."""

    @property
    def hidden_size(self) -> int:
        """Width of the layer."""
        ...

    @property
    def intermediate_size(self) -> int:
        """Width of the MLP."""
        ...

    @property
    def heads(self) -> int:
        """Attention heads."""
        ...

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        ...

    @property
    def head_dim(self) -> int:
        """Width of each."""
        ...


class Norm(nn.Module):
    """RMSNorm, computed in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._epsilon = epsilon

    def forward(self, states: Tensor) -> Tensor:
        """Normalized states, of the same shape and dtype."""
        wide = states.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._epsilon)
        return self.weight * scaled.to(states.dtype)


class Attention(nn.Module):
    """Attention of a head's one layer."""

    layer_idx = 0

    def __init__(self, shape: LayerShape, input_size: int, rotary: LlamaRotaryEmbedding) -> None:
        """
        Args:
            shape: the head's.
            input_size: width of what queries, keys and values are computed from.
            rotary: see `rotary_of`.
        """
        super().__init__()
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(input_size, width, bias=False)
        self.k_proj = nn.Linear(input_size, kv_width, bias=False)
        self.v_proj = nn.Linear(input_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)
        self.rotary_emb = rotary
        self._head_dim = shape.head_dim

    def forward(self, states: Tensor, positions: Tensor, step: Any) -> Tensor:
        """[1, tokens, hidden_size] of states [1, tokens, input_size] and positions [1, tokens]."""
        query, key, value = (
            projection(states).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        cosines, sines = self.rotary_emb(states, positions)
        query, key = apply_rotary_pos_emb(query, key, cosines, sines)
        attended, _ = attention_forward(self, query, key, value, None, tandem_step=step)
        output: Tensor = self.o_proj(attended.flatten(2))
        return output


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """[..., hidden_size] of states of this shape."""
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))
        return output


def rotary_of(shape: LayerShape, target: LoadedModel) -> LlamaRotaryEmbedding:
    """The target's rotary parameters: those in a head's own config are often left over from a template."""
    targets = text_config(target)
    own = LlamaConfig(
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.heads,
        head_dim=shape.head_dim,
        max_position_embeddings=targets.max_position_embeddings,
    )
    parameters = getattr(targets, "rope_parameters", None)
    if isinstance(parameters, dict) and "rope_type" in parameters:
        own.rope_parameters = dict(parameters)
    return LlamaRotaryEmbedding(own)
