"""DFlash (arXiv 2602.06036): a small Qwen3 model drafts a block of tokens in one pass.

The block is the last token of the text and a mask for each token to propose. Its tokens see each other both ways, and
the whole context before them. The context has no tokens: its keys and values in every layer come from the target's
states, projected to one. Embedding and output head are the target's, but a draft of the speculators format with a
reduced vocabulary has an output head of its own. Tensor names are those of z-lab's checkpoints, in either format.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from tandem.config.names import DFLASH
from tandem.engine.kv_cache.arena import LayerGeometry
from tandem.engine.models.heads.interface import BlockHead, HeadFile, HeadTensors, shared_layers
from tandem.engine.models.loading import LoadedModel

ARCHITECTURE = "DFlashDraftModel"

_OWNER = "a DFlash draft"
_SPECULATORS_TYPE = "speculators_model_type"
_LAYER_CONFIG = "transformer_layer_config"
_LAYER_MODELS = ("qwen3", "llama")
"""Families whose config names a speculators draft's layers; these are Qwen3's either way."""


class DFlashHead(BlockHead):
    """A DFlash draft; its parameters have the published names, with `decoder` for `layers`."""

    architecture = ARCHITECTURE
    embed_tokens: nn.Embedding
    """The target's, as `lm_head` is where the vocabulary is not reduced."""
    draft_vocabulary_size: int | None = None
    """Tokens that the draft can say, with an output layer of its own; None for all, by the target's."""
    renamed: Mapping[str, str] = {"model.": ""}
    written: Mapping[str, str] = {"decoder.": "layers."}

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        is_wrapped = _SPECULATORS_TYPE in self.file.content
        (self._read_wrapped if is_wrapped else self._read_raw)(self.file)

    def _read_raw(self, file: HeadFile) -> None:
        if file.content.get("architectures") != [ARCHITECTURE]:
            raise file.refusal(
                f"is no DFlash draft's: architectures is {file.content.get('architectures')!r}; it must be "
                f"['{ARCHITECTURE}']"
            )
        options = file.read_nested("dflash_config")
        self._take_shape(file)
        # Older checkpoints have it beside the layers' numbers, newer ones among the options.
        self.block_size = (file if "block_size" in file.content else options).number("block_size", minimum=2)
        self.mask_token_id = options.number("mask_token_id", minimum=0)
        # z-lab counts the layers from 0, and means their outputs.
        self.layer_ids = tuple(each + 1 for each in options.layer_ids("target_layer_ids"))

    def _read_wrapped(self, file: HeadFile) -> None:
        file.check(_OWNER, speculators_model_type=DFLASH, sample_from_anchor=False, projector_type=DFLASH)
        layers = file.read_nested(_LAYER_CONFIG)
        family = layers.content.get("model_type", _LAYER_MODELS[0])
        if family not in _LAYER_MODELS:
            raise file.refusal(
                f"has model_type {family!r} in {_LAYER_CONFIG}; {_OWNER} has {' or '.join(_LAYER_MODELS)} here"
            )
        _check_layers(file)
        vocabulary_size = layers.number("vocab_size")
        self._take_shape(layers)
        self.block_size = file.number("block_size", minimum=2)
        self.mask_token_id = file.number("mask_token_id", minimum=0)
        self.layer_ids = file.layer_ids("aux_hidden_state_layer_ids")
        own_size = file.number("draft_vocab_size", vocabulary_size)
        self.draft_vocabulary_size = None if own_size == vocabulary_size else own_size
        self.expected["target_hidden_size"] = file.number("target_hidden_size", self.state_size)

    def _take_shape(self, layers: HeadFile) -> None:
        """Read the layers' config. Numbers that it leaves out are the defaults of the family that it names."""
        _check_layers(layers)
        make = LlamaConfig if layers.content.get("model_type") == "llama" else Qwen3Config
        shape: Any = make(**{key: value for key, value in layers.content.items() if key != "model_type"})
        self.shape = shape
        self.state_size = shape.hidden_size
        self.vocabulary_size = shape.vocab_size
        self.expected = {"vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size}
        geometry = LayerGeometry(shape.num_key_value_heads, shape.head_dim, shape.head_dim)
        self.layers = (geometry,) * shape.num_hidden_layers

    def build(self, target: LoadedModel, tensors: Container[str] = ()) -> None:
        if self.mask_token_id >= self.vocabulary_size:
            raise self.misfit(
                f"has mask_token_id {self.mask_token_id}; it must be one of the {self.vocabulary_size} tokens of "
                f"{target.info.name}"
            )
        shape = self.shape
        size = self.state_size
        self.fc = nn.Linear(len(self.layer_ids) * size, size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(size, eps=shape.rms_norm_eps)
        self.decoder = nn.ModuleList(_Layer(shape, index) for index in range(shape.num_hidden_layers))
        self.norm = Qwen3RMSNorm(size, eps=shape.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(shape)
        if self.draft_vocabulary_size is not None:
            self.lm_head = nn.Linear(size, self.draft_vocabulary_size, bias=False)
        self.readers = (self.fc, self.hidden_norm)

    def read(self, target: LoadedModel, tensors: HeadTensors) -> None:
        super().read(target, tensors)
        self.embed_tokens, output_layer = shared_layers(target)
        if (count := self.draft_vocabulary_size) is None:
            self.lm_head = output_layer
        else:
            self.target_ids = tensors.target_ids("d2t", count, self.vocabulary_size, are_offsets=True)

    def combine(self, hidden_states: Sequence[Tensor]) -> Tensor:
        output: Tensor = self.hidden_norm(self.fc(torch.cat(list(hidden_states), dim=-1)))
        return output

    def of_blocks(
        self, token_ids: Tensor, positions: Tensor, states: Tensor, is_in_block: Tensor, step: Any
    ) -> Tensor:
        hidden = self.embed_tokens(token_ids[0, is_in_block])
        rotary = self.rotary_emb(states[None], positions)
        for layer in self.decoder:
            hidden = layer(hidden, states, is_in_block, rotary, step)
        output = torch.zeros_like(states)
        output[is_in_block] = self.norm(hidden)
        return output


class _Attention(Qwen3Attention):
    """Queries of the blocks; keys and values of the context's states and of the blocks."""

    def forward(  # type: ignore[override]
        self, block: Tensor, states: Tensor, is_in_block: Tensor, rotary: tuple[Tensor, Tensor], step: Any
    ) -> Tensor:
        mixed = states.clone()
        mixed[is_in_block] = block
        query, key, value = (
            projection(each).unflatten(-1, (-1, self.head_dim))
            for projection, each in ((self.q_proj, block), (self.k_proj, mixed), (self.v_proj, mixed))
        )
        cosines, sines = (each[0, :, None] for each in rotary)
        query = _rotate(self.q_norm(query), cosines[is_in_block], sines[is_in_block])
        key = _rotate(self.k_norm(key), cosines, sines)
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


def _rotate(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    turned: Tensor = rotate_half(states)  # type: ignore[no-untyped-call]
    return states * cosines + turned * sines


def _check_layers(layers: HeadFile) -> None:
    for key, allowed in (("layer_types", "full_attention"), ("hidden_act", "silu")):
        values = layers.content.get(key) or ()
        for value in (values,) if isinstance(values, str) else values:
            if value != allowed:
                raise layers.refusal(f"has {value!r} in {key}; {_OWNER} has {allowed} here")
