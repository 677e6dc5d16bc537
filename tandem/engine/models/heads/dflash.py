"""DFlash (arXiv 2602.06036): a small Qwen3 model drafts a block of tokens in one pass.

The block is the last token of the text and a mask for each token to propose. Its tokens see each other both ways, and
the whole context before them. The context has no tokens: its keys and values in every layer come from the target's
states, projected to one. Embedding and output head are the target's, but a draft of the speculators format with a
reduced vocabulary has an output head of its own. Tensor names are those of z-lab's checkpoints, in either format.
"""

from __future__ import annotations

from collections.abc import Sequence
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

from tandem.engine.kv_cache.layer_groups import LayerGeometry
from tandem.engine.models.heads.configs.dflash import DFlashConfig
from tandem.engine.models.heads.interface import BlockHead
from tandem.engine.models.heads.placement import placed
from tandem.engine.models.heads.sharing import shared_embedding, shared_output_head
from tandem.engine.models.heads.target import check_same, text_config
from tandem.engine.models.heads.tensors import HeadTensors, read_target_ids
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
