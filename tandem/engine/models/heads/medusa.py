"""Medusa (Cai et al. 2024, arXiv 2401.10774): several heads, each of which foresees one token from the same state.

Head i reads the target's final state at the last token that it has read, and proposes the token i + 2 places behind it:
the first of them after the token that the target has just given. As in vLLM, a proposal is a chain with one candidate
from each head. Tensor names are those of FasterDecoding's checkpoints and of vLLM's `MedusaModel`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tandem.config.names import MEDUSA
from tandem.engine.kv_cache.arena import LayerGeometry
from tandem.engine.models.checkpoint import CONFIG_FILE, read_object
from tandem.engine.models.heads.interface import (
    FINAL_STATE,
    DraftHead,
    HeadTensors,
    check_same,
    flag,
    placed,
    size,
    text_config,
)
from tandem.engine.models.loading import LoadedModel
from tandem.errors import ModelFolderError

_UNUSED_LAYER = LayerGeometry(1, 8, 8, window=1)
"""The heads have no attention; an engine's arena has at least one layer."""
_SHARED_OUTPUT_LAYER = "lm_head.weight"


class MedusaHeads(DraftHead):
    """All heads of a checkpoint; the parameters have vLLM's names."""

    def __init__(self, config: MedusaConfig, target: LoadedModel, *, has_bias: bool) -> None:
        super().__init__()
        size: int = text_config(target).hidden_size
        self.config = config
        self.layer_ids = (FINAL_STATE,)
        self.state_size = size
        self.tokens_per_pass = config.heads
        self.vocabulary_size = target.info.vocabulary_size
        own_size = config.truncated_vocabulary_size or self.vocabulary_size
        self.has_reduced_vocabulary = own_size < self.vocabulary_size
        self.layers = (_UNUSED_LAYER,)
        self.blocks = nn.ModuleList(
            _Block(size, config.layers, has_bias=has_bias) for _ in range(config.heads)
        )
        outputs = 1 if config.shares_output_layer else config.heads
        self.lm_heads = nn.ModuleList(nn.Linear(size, own_size, bias=False) for _ in range(outputs))
        self.register_buffer("token_map", torch.arange(own_size), persistent=False)
        """The target's id of each id that the heads can say."""

    @property
    def readers(self) -> Sequence[nn.Module]:
        """See `DraftHead`; the state is read as it is."""
        return ()

    def combined(self, hidden_states: Sequence[Tensor]) -> Tensor:
        """See `DraftHead`."""
        return hidden_states[0]

    def advanced(
        self, token_ids: Tensor, positions: Tensor, states: Tensor, step: Any
    ) -> tuple[Tensor, Tensor]:
        """See `DraftHead`. The heads read nothing but the last state."""
        return states, states

    def own_logits(self, hidden: Tensor) -> Tensor:
        """See `DraftHead`: [rows, heads * what they can say]."""
        outputs = [self.lm_heads[0]] * len(self.blocks) if self.config.shares_output_layer else self.lm_heads
        own = [output(block(hidden)) for block, output in zip(self.blocks, outputs, strict=True)]
        return torch.cat(own, dim=-1)

    def widened(self, own_logits: Tensor) -> Tensor:
        """See `DraftHead`: [rows, heads * vocabulary_size]."""
        if not self.has_reduced_vocabulary:
            return own_logits
        heads = len(self.blocks)
        own = own_logits.view(len(own_logits), heads, own_logits.shape[1] // heads)
        scores = own.new_full((*own.shape[:2], self.vocabulary_size), -torch.inf)
        token_map: Tensor = self.token_map  # type: ignore[assignment]  # a registered buffer
        return scores.index_copy_(2, token_map, own).flatten(1)


class _Block(nn.Module):
    """The residual layers of one head."""

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
    sizes = {"hidden_size": text_config(target).hidden_size, "vocab_size": target.info.vocabulary_size}
    for key, own in (("hidden_size", config.hidden_size), ("vocab_size", config.vocabulary_size)):
        if own is not None:
            check_same(config.folder, key, own, sizes[key], target)
    tensors = HeadTensors(config.folder, _renamed(config))
    heads = MedusaHeads(config, target, has_bias="blocks.0.layers.0.bias" in tensors)
    if heads.has_reduced_vocabulary:
        heads.token_map = _token_map(config, tensors, heads.vocabulary_size)
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
    reason = "by config.json and the target"
    if not name.startswith("lm_heads."):
        return tensors.read(name, tuple(parameter.shape), reason)
    if heads.config.shares_output_layer and _SHARED_OUTPUT_LAYER in tensors:
        name = _SHARED_OUTPUT_LAYER
    own_size, width = parameter.shape
    if heads.has_reduced_vocabulary and tensors.rows(name) == heads.vocabulary_size:
        # vLLM takes a whole output layer as well, and chooses its rows.
        token_map: Tensor = heads.token_map  # type: ignore[assignment]  # a registered buffer
        return tensors.read(name, (heads.vocabulary_size, width), reason)[token_map]
    return tensors.read(name, (own_size, width), reason)


def _token_map(config: MedusaConfig, tensors: HeadTensors, vocabulary_size: int) -> Tensor:
    count = config.truncated_vocabulary_size or vocabulary_size
    ids = tensors.read("token_map", (count,), "truncated_vocab_size").long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary_size or len(set(ids.tolist())) < count:
        raise ModelFolderError(
            f"the tensor token_map of the drafting head in {config.folder} has ids from {int(ids.min())} to "
            f"{int(ids.max())}; it must hold distinct ids in 0..{vocabulary_size - 1}"
        )
    return ids


_HEADS = ("medusa_num_heads", "num_heads", "num_lookahead_tokens")
_LAYERS = ("medusa_num_layers", "num_hidden_layers", "num_layers")


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
    method: str = MEDUSA


def read_medusa_config(folder: Path) -> MedusaConfig:
    """The config of Medusa heads.

    Raises:
        ModelFolderError: there is none, or a number in it is missing or wrong.
    """
    path = folder / CONFIG_FILE
    content = read_object(path, "a drafting head needs one")
    if not is_medusa(content):
        raise ModelFolderError(
            f"the file {path} is not that of Medusa heads: model_type is {content.get('model_type')!r} and has to be "
            "medusa, or there has to be a number medusa_num_heads"
        )
    vocabulary = _optional(path, content, "vocab_size")
    truncated = _optional(path, content, "truncated_vocab_size")
    architectures = content.get("architectures")
    return MedusaConfig(
        folder=folder,
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else "MedusaModel",
        heads=_first(path, content, _HEADS),
        layers=_first(path, content, _LAYERS),
        hidden_size=_optional(path, content, "hidden_size"),
        vocabulary_size=vocabulary,
        truncated_vocabulary_size=None if truncated == vocabulary else truncated,
        shares_output_layer=flag(path, content, "original_lm_head"),
    )  # fmt: skip


def is_medusa(content: Mapping[str, Any]) -> bool:
    """True if a config.json is that of Medusa heads."""
    return content.get("model_type") == "medusa" or "medusa_num_heads" in content


def _first(path: Path, content: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    key = next((key for key in keys if key in content), keys[0])
    return size(path, content, key)


def _optional(path: Path, content: Mapping[str, Any], key: str) -> int | None:
    return None if content.get(key) is None else size(path, content, key)
