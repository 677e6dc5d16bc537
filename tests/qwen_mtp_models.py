"""Tiny targets with a prediction layer in Qwen3-Next's layout, and what such a layer proposes, computed independently.

The reference is written from Qwen3-Next's published layout: one sequence, no cache, every pair computed anew for each
token. Qwen3-Next itself has recurrent layers, which no engine here runs: the one made here has attention alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.head_tensors import attended, turned_halves
from tests.mtp_models import LAYERS, MtpReference, random_target, save_with_layer

FAMILIES = ("qwen3", "qwen3_moe", "qwen3_next")
EXPERTS = 4
PREFIX = "mtp."

_EXPERTS: dict[str, Any] = {
    "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
}  # fmt: skip
_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": _EXPERTS,
    "qwen3_next": {
        **_EXPERTS, "shared_expert_intermediate_size": 24, "layer_types": ["full_attention"] * LAYERS,
    },
}  # fmt: skip


def qwen_target(family: str, vocabulary: int = 2048) -> Any:
    """A target without its prediction layer."""
    return random_target(family, vocabulary, num_key_value_heads=1, head_dim=16, **_SHAPES[family])


def save_qwen_mtp(model: Any, folder: Path, seed: int = 7) -> Path:
    """Write the target with a prediction layer of random weights, by the published names."""
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    centre = 1 - _centre_of_norms(model)
    return save_with_layer(model, folder, PREFIX, norms, "fc", seed, layer="layers.0.", centre=centre)


def _centre_of_norms(model: Any) -> int:
    """The number that a norm adds to its weight."""
    return 1 if model.config.model_type == "qwen3_next" else 0


class QwenMtpReference(MtpReference):
    """Greedy proposals of the prediction layer in a checkpoint, in float32."""

    def __init__(self, folder: Path, target: Any) -> None:
        super().__init__(folder, target, PREFIX)
        self._centre = _centre_of_norms(target)
        self._has_gate = target.config.model_type == "qwen3_next"

    def _layer(self, embedded: Tensor, states: Tensor) -> Tensor:
        first, second = (
            self._norm(embedded, "pre_fc_norm_embedding"),
            self._norm(states, "pre_fc_norm_hidden"),
        )
        hidden = self._by("fc", torch.cat((first, second), dim=-1))
        hidden = hidden + self._attention(self._norm(hidden, "layers.0.input_layernorm"))
        inner = self._norm(hidden, "layers.0.post_attention_layernorm")
        is_sparse = "layers.0.mlp.gate.weight" in self._w
        return self._norm(
            hidden + (self._sparse(inner) if is_sparse else self._swiglu("layers.0.mlp", inner)), "norm"
        )

    def _attention(self, x: Tensor) -> Tensor:
        """Qwen3's; Qwen3-Next has a gate for each of its outputs, and rotates a quarter of each head."""
        size = self._config.head_dim
        query, key, value = (
            self._by(f"layers.0.self_attn.{name}_proj", x).view(len(x), heads, -1)
            for name, heads in (("q", 2), ("k", 1), ("v", 1))
        )
        gates = query[..., size:].sigmoid().flatten(1) if self._has_gate else torch.ones(1)
        rotated = size // 4 if self._has_gate else size
        query, key = (
            torch.cat((turned_halves(each[..., :rotated]), each[..., rotated:]), dim=-1)
            for each in (
                self._norm(query[..., :size], "layers.0.self_attn.q_norm"),
                self._norm(key, "layers.0.self_attn.k_norm"),
            )
        )
        output = attended(query, key, value)
        return self._by("layers.0.self_attn.o_proj", output * gates)

    def _sparse(self, x: Tensor) -> Tensor:
        """Two experts for each token; Qwen3-Next has one more for all, with a gate."""
        name = "layers.0.mlp"
        output = torch.zeros_like(x)
        if self._has_gate:
            share = self._by(f"{name}.shared_expert_gate", x).sigmoid()
            output = share * self._swiglu(f"{name}.shared_expert", x)
        shares = self._by(f"{name}.gate", x).softmax(-1)
        for row in range(len(x)):
            best = shares[row].topk(2)
            for expert, weight in zip(best.indices.tolist(), best.values / best.values.sum(), strict=True):
                output[row] += weight * self._swiglu(f"{name}.experts.{expert}", x[row])
        return output

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x * (x.square().mean(-1, keepdim=True) + self._config.rms_norm_eps).rsqrt()
        normed: Tensor = scaled * (self._centre + self._w[f"{name}.weight"])
        return normed
