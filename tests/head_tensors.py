"""Random tensors of drafting heads, their files, and the layers of references, which are written from publications."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional


class Numbers:
    """Random tensors, by a seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def plain(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def matrix(self, rows: int, columns: int) -> Tensor:
        numbers: Tensor = self.plain(rows, columns) / columns**0.5
        return numbers

    def norm(self, width: int) -> Tensor:
        return 1 + 0.2 * self.plain(width)

    def attention(
        self, size: int, input_size: int, heads: int, kv_heads: int, head_dim: int
    ) -> dict[str, Tensor]:
        return {
            "self_attn.q_proj.weight": self.matrix(heads * head_dim, input_size),
            "self_attn.k_proj.weight": self.matrix(kv_heads * head_dim, input_size),
            "self_attn.v_proj.weight": self.matrix(kv_heads * head_dim, input_size),
            "self_attn.o_proj.weight": self.matrix(size, heads * head_dim),
        }

    def mlp(self, size: int, width: int) -> dict[str, Tensor]:
        return {
            "mlp.gate_proj.weight": self.matrix(width, size),
            "mlp.up_proj.weight": self.matrix(width, size),
            "mlp.down_proj.weight": self.matrix(size, width),
        }

    def chosen(self, vocabulary: int, count: int) -> Tensor:
        """Distinct ids of a vocabulary."""
        return torch.randperm(vocabulary, generator=self.generator)[:count]


def saved(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    return folder


class Layers:
    """Layers over the tensors of a checkpoint, in float32: one sequence, no cache."""

    _w: dict[str, Tensor]
    _epsilon = 1e-5

    def _by(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self._w[f"{name}.weight"], self._w.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self._w[f"{name}.weight"], self._epsilon)

    def _swiglu(self, name: str, x: Tensor) -> Tensor:
        gated = functional.silu(self._by(f"{name}.gate_proj", x)) * self._by(f"{name}.up_proj", x)
        return self._by(f"{name}.down_proj", gated)


def attended(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = True) -> Tensor:
    """Attention of [tokens, heads, size] each, flattened over the heads; heads of keys and values may be shared."""
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones(len(query), len(query)).triu(1).bool(), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)


def angles(x: Tensor, theta: float = 10000.0, first: int = 0) -> tuple[Tensor, Tensor]:
    """Cosines and sines for the positions from `first` on, [tokens, 1, half of the size] both."""
    half = x.shape[-1] // 2
    found = torch.arange(first, first + len(x))[:, None] / theta ** (torch.arange(half) / half)
    return found.cos()[:, None], found.sin()[:, None]


def turned_halves(x: Tensor, theta: float = 10000.0, first: int = 0) -> Tensor:
    """Rotary positions, for pairs of a number of each half."""
    (cosines, sines), (left, right) = angles(x, theta, first), x.chunk(2, dim=-1)
    return torch.cat((left * cosines - right * sines, right * cosines + left * sines), dim=-1)
