"""Medusa (Cai et al. 2024, arXiv 2401.10774): several heads, each of which foresees one token from the same state.

Head i reads the target's final state at the last token that it has read, and proposes the token i + 2 places behind it:
the first of them after the token that the target has just given. As in vLLM, a proposal is a chain with one candidate
from each head.

Configs and tensor names are FasterDecoding's or those of vLLM's `MedusaModel`. FasterDecoding's config has
`medusa_num_heads` and `medusa_num_layers`, and leaves the widths to the target. vLLM's has `model_type` medusa, calls
the two numbers `num_heads` and `num_hidden_layers`, and names the widths.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tandem.engine.kv_cache.arena import LayerGeometry
from tandem.engine.models.heads.interface import DraftHead, HeadTensors, PassStates, text_config
from tandem.engine.models.loading import LoadedModel

_HEADS = ("medusa_num_heads", "num_heads", "num_lookahead_tokens")
_LAYERS = ("medusa_num_layers", "num_hidden_layers", "num_layers")
_UNUSED_LAYER = LayerGeometry(1, 8, 8, window=1)
"""The heads have no attention; an engine's arena has at least one layer."""
_SHARED_OUTPUT_LAYER = "lm_head.weight"
_REASON = "by config.json and the target"


class MedusaHeads(DraftHead):
    """All heads of a checkpoint; the parameters have vLLM's names."""

    layers = (_UNUSED_LAYER,)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        file = self.file
        content = self.file.content
        if content.get("model_type") != "medusa" and _HEADS[0] not in content:
            raise file.refusal(
                f"is not that of Medusa heads: model_type is {content.get('model_type')!r} and has to be medusa, or "
                f"there has to be a number {_HEADS[0]}"
            )
        # Each head proposes one token, so that a proposal has at most this many.
        self.tokens_per_pass, self.block_count = (
            file.number(next((key for key in keys if key in content), keys[0])) for keys in (_HEADS, _LAYERS)
        )
        self.architecture = file.architecture("MedusaModel")
        self.expected = {key: file.optional_number(key) for key in ("hidden_size", "vocab_size")}
        self.truncated_size = file.optional_number("truncated_vocab_size")
        """Tokens that the heads can say, which a tensor `token_map` lists; None for all."""
        if self.truncated_size == self.expected["vocab_size"]:
            self.truncated_size = None
        self.shares_output_layer = file.flag("original_lm_head")
        self.renamed = _own_names(self.tokens_per_pass, self.block_count)

    def build(self, target: LoadedModel, tensors: Container[str] = ()) -> None:
        self.state_size = size = text_config(target).hidden_size
        self.vocabulary_size = target.info.vocabulary_size
        has_bias = "blocks.0.layers.0.bias" in tensors
        self.blocks = nn.ModuleList(
            _Block(size, self.block_count, has_bias=has_bias) for _ in range(self.tokens_per_pass)
        )
        outputs = 1 if self.shares_output_layer else self.tokens_per_pass
        own_size = self.truncated_size or self.vocabulary_size
        self.lm_heads = nn.ModuleList(nn.Linear(size, own_size, bias=False) for _ in range(outputs))

    def read(self, target: LoadedModel, tensors: HeadTensors) -> None:
        count = self.truncated_size
        if count is not None and count < self.vocabulary_size:
            self.target_ids = tensors.target_ids("token_map", count, self.vocabulary_size, are_offsets=False)
        super().read(target, tensors)

    def convert(self, name: str, parameter: Tensor, tensors: HeadTensors) -> Tensor:
        if name.startswith("lm_heads."):
            if self.shares_output_layer and _SHARED_OUTPUT_LAYER in tensors:
                name = _SHARED_OUTPUT_LAYER
            if self.target_ids is not None and tensors.rows(name) == self.vocabulary_size:
                # vLLM takes a whole output layer as well, and chooses its rows.
                shape = self.vocabulary_size, parameter.shape[1]
                return tensors.read(name, shape, _REASON)[self.target_ids]
        return tensors.read(name, parameter.shape, _REASON)

    def advance(self, token_ids: Tensor, positions: Tensor, states: Tensor, step: Any) -> PassStates:
        return states, states

    def own_logits(self, hidden: Tensor) -> Tensor:
        """See `DraftHead`: [rows, heads * what they can say]."""
        outputs = [self.lm_heads[0]] * len(self.blocks) if self.shares_output_layer else self.lm_heads
        own = [output(block(hidden)) for block, output in zip(self.blocks, outputs, strict=True)]
        return torch.cat(own, dim=-1)


class _Block(nn.Module):
    def __init__(self, size: int, count: int, *, has_bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=has_bias) for _ in range(count))

    def forward(self, states: Tensor) -> Tensor:
        for layer in self.layers:
            states = states + functional.silu(layer(states))
        return states


def _own_names(heads: int, layers: int) -> dict[str, str]:
    """FasterDecoding's names: `{head}.{layer}.linear`, and behind the last layer the head's output layer."""
    renamed = {"medusa_heads.": "", "medusa_head.": ""}
    for head in range(heads):
        renamed[f"{head}.{layers}."] = f"lm_heads.{head}."
        renamed |= {f"{head}.{layer}.linear.": f"blocks.{head}.layers.{layer}." for layer in range(layers)}
    return renamed
