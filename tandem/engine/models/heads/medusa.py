"""Medusa (Cai et al. 2024, arXiv 2401.10774): several heads, each of which foresees one token from the same state.

Head i reads the target's final state at the last token that it has read, and proposes the token i + 2 places behind it:
the first of them after the token that the target has just given. As in vLLM, a proposal is a chain with one candidate
from each head.

Configs and tensor names are FasterDecoding's or those of vLLM's `MedusaModel`. FasterDecoding's config has
`medusa_num_heads` and `medusa_num_layers`, and leaves the widths to the target. vLLM's has `model_type` medusa, calls
the two numbers `num_heads` and `num_hidden_layers`, and names the widths.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tandem.engine.kv_cache.arena import LayerGeometry
from tandem.engine.models.heads.interface import (
    DraftHead,
    HeadFile,
    HeadTensors,
    PassStates,
    check_target,
    placed,
    text_config,
)
from tandem.engine.models.loading import LoadedModel

_HEADS = ("medusa_num_heads", "num_heads", "num_lookahead_tokens")
_LAYERS = ("medusa_num_layers", "num_hidden_layers", "num_layers")
_UNUSED_LAYER = LayerGeometry(1, 8, 8, window=1)
"""The heads have no attention; an engine's arena has at least one layer."""
_SHARED_OUTPUT_LAYER = "lm_head.weight"
_REASON = "by config.json and the target"


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Shape of a Medusa checkpoint."""

    folder: Path
    architecture: str
    heads: int
    """Each proposes one token, so that a proposal has at most this many."""
    layers: int
    """Residual blocks of a head."""
    hidden_size: int | None
    """Width of the target's states; None where the checkpoint leaves it to the target."""
    vocabulary_size: int | None
    """The target's, likewise."""
    truncated_vocabulary_size: int | None
    """Tokens that the heads can say, which a tensor `token_map` lists; None for all."""
    shares_output_layer: bool
    """All heads have one output layer (vLLM's `original_lm_head`)."""


def read_medusa_config(folder: Path) -> MedusaConfig:
    """The config of Medusa heads.

    Raises:
        ModelFolderError: there is none, or a number in it is missing or wrong.
    """
    file = HeadFile.of(folder)
    content = file.content
    if content.get("model_type") != "medusa" and _HEADS[0] not in content:
        raise file.refusal(
            f"is not that of Medusa heads: model_type is {content.get('model_type')!r} and has to be medusa, or there "
            f"has to be a number {_HEADS[0]}"
        )
    heads, layers = (
        file.number(next((key for key in keys if key in content), keys[0])) for keys in (_HEADS, _LAYERS)
    )
    vocabulary_size = file.optional_number("vocab_size")
    truncated = file.optional_number("truncated_vocab_size")
    return MedusaConfig(
        folder=folder,
        architecture=file.architecture("MedusaModel"),
        heads=heads,
        layers=layers,
        hidden_size=file.optional_number("hidden_size"),
        vocabulary_size=vocabulary_size,
        truncated_vocabulary_size=None if truncated == vocabulary_size else truncated,
        shares_output_layer=file.flag("original_lm_head"),
    )


class MedusaHeads(DraftHead):
    """All heads of a checkpoint; the parameters have vLLM's names."""

    def __init__(self, config: MedusaConfig, target: LoadedModel, *, has_bias: bool) -> None:
        super().__init__()
        size: int = text_config(target).hidden_size
        self.config = config
        self.architecture = config.architecture
        self.state_size = size
        self.tokens_per_pass = config.heads
        self.vocabulary_size = target.info.vocabulary_size
        own_size = config.truncated_vocabulary_size or self.vocabulary_size
        self.layers = (_UNUSED_LAYER,)
        self.blocks = nn.ModuleList(
            _Block(size, config.layers, has_bias=has_bias) for _ in range(config.heads)
        )
        outputs = 1 if config.shares_output_layer else config.heads
        self.lm_heads = nn.ModuleList(nn.Linear(size, own_size, bias=False) for _ in range(outputs))

    def advanced(self, token_ids: Tensor, positions: Tensor, states: Tensor, step: Any) -> PassStates:
        return states, states

    def own_logits(self, hidden: Tensor) -> Tensor:
        """See `DraftHead`: [rows, heads * what they can say]."""
        outputs = [self.lm_heads[0]] * len(self.blocks) if self.config.shares_output_layer else self.lm_heads
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


def load_medusa(config: MedusaConfig, target: LoadedModel) -> MedusaHeads:
    """The heads, in the target's dtype and on its device.

    Raises:
        ModelFolderError: a tensor is missing or has another shape than the config says, or the heads belong to another
            target.
    """
    check_target(config.folder, target, hidden_size=config.hidden_size, vocab_size=config.vocabulary_size)
    tensors = HeadTensors(config.folder, _renamed(config))
    heads = MedusaHeads(config, target, has_bias="blocks.0.layers.0.bias" in tensors)
    count = config.truncated_vocabulary_size
    if count is not None and count < heads.vocabulary_size:
        heads.target_ids = tensors.target_ids("token_map", count, heads.vocabulary_size, are_offsets=False)
    with torch.no_grad():
        for name, parameter in heads.named_parameters():
            parameter.copy_(_read(name, parameter, heads, tensors))
    return placed(heads, target)


def _renamed(config: MedusaConfig) -> dict[str, str]:
    """FasterDecoding's names: `{head}.{layer}.linear`, and behind the last layer the head's output layer."""
    renamed = {"medusa_heads.": "", "medusa_head.": ""}
    for head in range(config.heads):
        renamed[f"{head}.{config.layers}."] = f"lm_heads.{head}."
        renamed |= {
            f"{head}.{layer}.linear.": f"blocks.{head}.layers.{layer}." for layer in range(config.layers)
        }
    return renamed


def _read(name: str, parameter: Tensor, heads: MedusaHeads, tensors: HeadTensors) -> Tensor:
    if name.startswith("lm_heads."):
        if heads.config.shares_output_layer and _SHARED_OUTPUT_LAYER in tensors:
            name = _SHARED_OUTPUT_LAYER
        if heads.target_ids is not None and tensors.rows(name) == heads.vocabulary_size:
            # vLLM takes a whole output layer as well, and chooses its rows.
            return tensors.read(name, (heads.vocabulary_size, parameter.shape[1]), _REASON)[heads.target_ids]
    return tensors.read(name, parameter.shape, _REASON)
