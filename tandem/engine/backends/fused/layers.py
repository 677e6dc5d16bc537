"""Computes a layer of the Llama family in fewer operations.

On a GPU each operation is a kernel, and a step of few tokens waits for the launch and the memory traffic of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tandem.engine.models.attention import attention_forward


class FusedNorm(nn.Module):
    """RMSNorm by torch's own function, which is one kernel on CUDA."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self._epsilon: float = norm.variance_epsilon

    def forward(self, hidden_states: Tensor) -> Tensor:
        """See `torch.nn.functional.rms_norm`."""
        return functional.rms_norm(hidden_states, self.weight.shape, self.weight, self._epsilon)


class FusedRotary(nn.Module):
    """The model's rotary embedding, prepared for `rotated`."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines, and sines of which the first half is negated, [1, tokens, 1, dim] both. Once for all layers."""
        cosines, sines = self.rotary(hidden_states, position_ids=position_ids)
        first, second = sines.chunk(2, dim=-1)
        return cosines[:, :, None], torch.cat((-first, second), dim=-1)[:, :, None]


def rotated(states: Tensor, cosines: Tensor, signed_sines: Tensor) -> Tensor:
    """Rotary position embedding of some heads, [1, tokens, heads, dim]."""
    swapped = states.view(*states.shape[:-1], 2, -1).flip(-2).flatten(-2)
    return torch.addcmul(states * cosines, swapped, signed_sines)


class FusedAttention(nn.Module):
    """Attention with one product for query, key and value, and one rotation for query and key."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.layer_idx: int = attention.layer_idx
        self.scaling: float = attention.scaling
        self.weight, self.bias = merged((attention.q_proj, attention.k_proj, attention.v_proj))
        self.o_proj = attention.o_proj
        self.attention_forward: Callable[..., tuple[Tensor, None]] = attention_forward
        """The function that attends; see `tandem.engine.models.attention`."""
        dim: int = attention.head_dim
        self._dim = dim
        self._heads = attention.q_proj.out_features // dim
        self._kv_heads = attention.k_proj.out_features // dim
        self.head_weights: nn.Parameter | None = None
        """[heads + kv_heads, dim] of the norms of query and key, where there are any."""
        if hasattr(attention, "q_norm"):
            weights = (
                attention.q_norm.weight.expand(self._heads, -1),
                attention.k_norm.weight.expand(self._kv_heads, -1),
            )
            self.head_weights = nn.Parameter(torch.cat(weights), requires_grad=False)
            self._epsilon: float = attention.q_norm.variance_epsilon

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        """Like transformers' attention, whose cache is not used; `position_embeddings` are those of `FusedRotary`."""
        heads, kv_heads = self._heads, self._kv_heads
        states = functional.linear(hidden_states, self.weight, self.bias)
        states = states.view(*states.shape[:-1], -1, self._dim)
        rotating, value = torch.split(states, [heads + kv_heads, kv_heads], dim=2)
        if self.head_weights is not None:
            rotating = functional.rms_norm(rotating, (self._dim,), None, self._epsilon) * self.head_weights
        rotating = rotated(rotating, *position_embeddings)
        query, key = torch.split(rotating, [heads, kv_heads], dim=2)
        output, _ = self.attention_forward(
            self,
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attention_mask,
            scaling=self.scaling,
            tandem_step=arguments.get("tandem_step"),
        )
        return self.o_proj(output.flatten(-2)), None


class FusedMlp(nn.Module):
    """A gated MLP with one product for gate and up."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.weight, self.bias = merged((mlp.gate_proj, mlp.up_proj))
        self.act_fn = mlp.act_fn
        self.down_proj = mlp.down_proj

    def forward(self, hidden_states: Tensor) -> Tensor:
        """See transformers' MLP."""
        gate, up = functional.linear(hidden_states, self.weight, self.bias).chunk(2, dim=-1)
        output: Tensor = self.down_proj(self.act_fn(gate) * up)
        return output


def merged(linears: Sequence[nn.Linear]) -> tuple[nn.Parameter, nn.Parameter | None]:
    """One weight and one bias for several products of the same input. The layers' own become views of them."""
    biases: list[Tensor | None] = [linear.bias for linear in linears]
    present = [bias for bias in biases if bias is not None]
    return _joined([linear.weight for linear in linears]), _joined(present) if present else None


def _joined(parts: Sequence[Tensor]) -> nn.Parameter:
    whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
        part.data = view
    return nn.Parameter(whole, requires_grad=False)
