"""DFlash (arXiv 2602.06036): a small Qwen3 model drafts a block of tokens in one pass.

The block is the last token of the text and a mask for each token to propose. Its tokens see each other both ways, and
the whole context before them. The context has no tokens: its keys and values in every layer come from the target's
states, projected to one. Embedding and output head are the target's, but a draft of the speculators format with a
reduced vocabulary has an output head of its own. Tensor names are those of z-lab's checkpoints, in either format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from tandem.config.names import DFLASH
from tandem.engine.kv_cache.arena import LayerGeometry
from tandem.engine.models.checkpoint import CONFIG_FILE, read_object
from tandem.engine.models.heads.interface import (
    BlockHead,
    HeadTensors,
    check_same,
    nested,
    placed,
    read_target_ids,
    shared_embedding,
    shared_output_head,
    size,
    text_config,
)
from tandem.engine.models.loading import LoadedModel
from tandem.errors import ModelFolderError


class DFlashHead(BlockHead):
    """The draft's module; its parameters have the published names, with `decoder` for `layers`."""

    embed_tokens: nn.Embedding
    """The target's, as `lm_head` is where the vocabulary is not reduced."""
    lm_head: nn.Linear

    def __init__(self, config: DFlashConfig, target: LoadedModel) -> None:
        super().__init__()
        shape: Any = _shape(config)
        self.layer_ids = config.layer_ids
        self.state_size = shape.hidden_size
        self.vocabulary_size = target.info.vocabulary_size
        self.block_size, self.mask_token_id = config.block_size, config.mask_token_id
        geometry = LayerGeometry(shape.num_key_value_heads, shape.head_dim, shape.head_dim)
        self.layers = (geometry,) * shape.num_hidden_layers
        self.fc = nn.Linear(len(config.layer_ids) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.decoder = nn.ModuleList(_Layer(shape, index) for index in range(shape.num_hidden_layers))
        self.norm = Qwen3RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(shape)
        self.has_reduced_vocabulary = config.draft_vocabulary_size is not None
        if config.draft_vocabulary_size is not None:
            self.lm_head = nn.Linear(shape.hidden_size, config.draft_vocabulary_size, bias=False)
        self.register_buffer("target_ids", None, persistent=False)
        """The target's id of each id of a reduced vocabulary."""

    @property
    def readers(self) -> Sequence[nn.Module]:
        """See `DraftHead`."""
        return (self.fc, self.hidden_norm)

    def combined(self, hidden_states: Sequence[Tensor]) -> Tensor:
        """See `DraftHead`."""
        output: Tensor = self.hidden_norm(self.fc(torch.cat(list(hidden_states), dim=-1)))
        return output

    def of_blocks(
        self, token_ids: Tensor, positions: Tensor, states: Tensor, is_in_block: Tensor, step: Any
    ) -> Tensor:
        """See `BlockHead`."""
        hidden = self.embed_tokens(token_ids[0, is_in_block])
        rotary = self.rotary_emb(states[None], positions)
        for layer in self.decoder:
            hidden = layer(hidden, states, is_in_block, rotary, step)
        output = torch.zeros_like(states)
        output[is_in_block] = self.norm(hidden)
        return output

    def own_logits(self, hidden: Tensor) -> Tensor:
        """See `DraftHead`."""
        own: Tensor = self.lm_head(hidden)
        return own

    def widened(self, own_logits: Tensor) -> Tensor:
        """See `DraftHead`."""
        target_ids: Tensor | None = self.target_ids  # type: ignore[assignment]  # a registered buffer
        if target_ids is None:
            return own_logits
        scores = own_logits.new_full((len(own_logits), self.vocabulary_size), -torch.inf)
        return scores.index_copy_(1, target_ids, own_logits)


class _Attention(nn.Module):
    """Queries of the blocks; keys and values of the context's states and of the blocks."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self._head_dim: int = config.head_dim
        size, bias = config.hidden_size, bool(config.attention_bias)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(size, heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(size, kv_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(size, kv_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * config.head_dim, size, bias=bias)
        self.q_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(
        self, block: Tensor, states: Tensor, is_in_block: Tensor, rotary: tuple[Tensor, Tensor], step: Any
    ) -> Tensor:
        mixed = states.clone()
        mixed[is_in_block] = block
        query, key, value = (
            projection(each).unflatten(-1, (-1, self._head_dim))
            for projection, each in ((self.q_proj, block), (self.k_proj, mixed), (self.v_proj, mixed))
        )
        cosines, sines = (each[0, :, None] for each in rotary)
        query = _rotated(self.q_norm(query), cosines[is_in_block], sines[is_in_block])
        key = _rotated(self.k_norm(key), cosines, sines)
        attended = step.attend_blocks(self, query, key, value, is_in_block)
        output: Tensor = self.o_proj(attended.flatten(1))
        return output


class _Layer(nn.Module):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = _Attention(config, layer_idx)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Qwen3MLP(config)  # type: ignore[no-untyped-call]

    def forward(
        self, hidden: Tensor, states: Tensor, is_in_block: Tensor, rotary: tuple[Tensor, Tensor], step: Any
    ) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), states, is_in_block, rotary, step)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


def _rotated(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    turned: Tensor = rotate_half(states)  # type: ignore[no-untyped-call]
    return states * cosines + turned * sines


def load_dflash(config: DFlashConfig, target: LoadedModel) -> DFlashHead:
    """The head, in the target's dtype and on its device.

    Raises:
        ModelFolderError: a tensor is missing or has another shape than the config says, or the draft belongs to
            another target.
    """
    _check_target(config, target)
    tensors = HeadTensors(config.folder, {"model.": ""})
    head = DFlashHead(config, target)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            published = name.replace("decoder.", "layers.", 1)
            parameter.copy_(tensors.read(published, tuple(parameter.shape), "by config.json"))
    head.embed_tokens = shared_embedding(target)
    if config.draft_vocabulary_size is None:
        head.lm_head = shared_output_head(target)
    else:
        whole = target.info.vocabulary_size
        head.target_ids = read_target_ids(tensors, config.folder, config.draft_vocabulary_size, whole)
    return placed(head, target)


def _shape(config: DFlashConfig) -> Any:
    """The layers' config. Numbers that it leaves out are the defaults of the family that it names."""
    make = LlamaConfig if config.content.get("model_type") == "llama" else Qwen3Config
    return make(**{key: value for key, value in config.content.items() if key != "model_type"})


def _check_target(config: DFlashConfig, target: LoadedModel) -> None:
    targets, content = text_config(target), config.content
    for key, own, other in (
        ("vocab_size", content.get("vocab_size"), target.info.vocabulary_size),
        ("hidden_size", content.get("hidden_size"), targets.hidden_size),
        ("target_hidden_size", config.target_hidden_size or targets.hidden_size, targets.hidden_size),
    ):
        check_same(config.folder, key, own, other, target)
    if config.mask_token_id >= target.info.vocabulary_size:
        raise ModelFolderError(
            f"the drafting head in {config.folder} has mask_token_id {config.mask_token_id}; it must be one of the "
            f"{target.info.vocabulary_size} tokens of {target.info.name}"
        )
    if max(config.layer_ids) > targets.num_hidden_layers:
        raise ModelFolderError(
            f"the drafting head in {config.folder} reads the target's states after {list(config.layer_ids)} layers; "
            f"{target.info.name} has {targets.num_hidden_layers}"
        )


ARCHITECTURE = "DFlashDraftModel"

_SPECULATORS_TYPE, _LAYER_CONFIG = "speculators_model_type", "transformer_layer_config"
_OPTIONS = "dflash_config"
_LAYER_MODELS = ("qwen3", "llama")
"""Families whose config names a speculators draft's layers; these are Qwen3's either way."""


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Settings that a DFlash draft needs beside its layers' config."""

    architecture = ARCHITECTURE

    folder: Path
    content: Mapping[str, Any]
    """The layers' config, that of a small Qwen3 model."""
    block_size: int
    """Tokens of a block: the last one of the text, and the masks that become the proposal."""
    mask_token_id: int
    layer_ids: tuple[int, ...]
    """Which of the target's states are read, by the number of layers before them."""
    draft_vocabulary_size: int | None = None
    """Tokens that the draft can say, with an output layer of its own; None for all, by the target's."""
    target_hidden_size: int | None = None
    """Width of the target's states; None where the config leaves it to the draft's own width."""


def read_dflash_config(folder: Path) -> DFlashConfig:
    """The config of a DFlash draft.

    Raises:
        ModelFolderError: there is none, or a number in it is missing or wrong.
    """
    path = folder / CONFIG_FILE
    content = read_object(path, "a drafting head needs one")
    return _wrapped(path, content) if _SPECULATORS_TYPE in content else _raw(path, content)


def _raw(path: Path, content: Mapping[str, Any]) -> DFlashConfig:
    names = content.get("architectures")
    if names != [ARCHITECTURE]:
        raise ModelFolderError(
            f"the file {path} is no DFlash draft's: architectures is {names!r}; it must be ['{ARCHITECTURE}']"
        )
    options = nested(path, content, _OPTIONS)
    _check_layers(path, content)
    # Older checkpoints have it beside the layers' numbers, newer ones among the options.
    block_size = content.get("block_size", options.get("block_size"))
    return DFlashConfig(
        folder=path.parent,
        content=content,
        block_size=_block_size(path, block_size),
        mask_token_id=_mask_token_id(path, options.get("mask_token_id"), f"{_OPTIONS}.mask_token_id"),
        # z-lab counts the layers from 0, and means their outputs.
        layer_ids=tuple(
            each + 1
            for each in _layer_ids(path, options.get("target_layer_ids"), f"{_OPTIONS}.target_layer_ids")
        ),
    )


def _wrapped(path: Path, content: Mapping[str, Any]) -> DFlashConfig:
    if content[_SPECULATORS_TYPE] != DFLASH:
        raise ModelFolderError(
            f"the file {path} has {_SPECULATORS_TYPE} {content[_SPECULATORS_TYPE]!r}; that of a DFlash draft must be "
            f"{DFLASH!r}"
        )
    layers = nested(path, content, _LAYER_CONFIG)
    if layers.get("model_type", _LAYER_MODELS[0]) not in _LAYER_MODELS:
        raise ModelFolderError(
            f"the file {path} has model_type {layers['model_type']!r} in {_LAYER_CONFIG}; a DFlash draft has "
            f"{' or '.join(_LAYER_MODELS)} here"
        )
    for each in (layers, content):
        _check_layers(path, each)
    for key, only in (("sample_from_anchor", False), ("projector_type", DFLASH)):
        if content.get(key) not in (None, only):
            raise ModelFolderError(
                f"the file {path} has {key} {content[key]!r}; a DFlash draft has {only!r} here"
            )
    vocabulary_size, hidden_size = size(path, layers, "vocab_size"), size(path, layers, "hidden_size")
    draft_vocabulary_size = size(path, content, "draft_vocab_size", vocabulary_size)
    return DFlashConfig(
        folder=path.parent,
        content=layers,
        block_size=_block_size(path, content.get("block_size")),
        mask_token_id=_mask_token_id(path, content.get("mask_token_id"), "mask_token_id"),
        layer_ids=_layer_ids(path, content.get("aux_hidden_state_layer_ids"), "aux_hidden_state_layer_ids"),
        draft_vocabulary_size=None if draft_vocabulary_size == vocabulary_size else draft_vocabulary_size,
        target_hidden_size=size(path, content, "target_hidden_size", hidden_size),
    )


def _check_layers(path: Path, layers: Mapping[str, Any]) -> None:
    for key, allowed in (("layer_types", "full_attention"), ("hidden_act", "silu")):
        values = layers.get(key) or ()
        for value in (values,) if isinstance(values, str) else values:
            if value != allowed:
                raise ModelFolderError(
                    f"the file {path} has {value!r} in {key}; a DFlash draft has {allowed} here"
                )


def _block_size(path: Path, value: object) -> int:
    if type(value) is not int or value < 2:
        raise ModelFolderError(
            f"the file {path} should have a number of at least 2 in block_size, but it is {value!r}"
        )
    return value


def _mask_token_id(path: Path, value: object, key: str) -> int:
    if type(value) is not int or value < 0:
        raise ModelFolderError(f"the file {path} should have a token id in {key}, but it is {value!r}")
    return value


def _layer_ids(path: Path, value: object, key: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(each) is int and each >= 0 for each in value):
        raise ModelFolderError(f"the file {path} should have layer numbers in {key}, but it is {value!r}")
    return tuple(value)
