"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one layer over the token's embedding and three of the target's states.

Tensor names and flags are those of SafeAILab's checkpoints and of the speculators format, as vLLM 0.32 reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tandem.engine.kv_cache.arena import LayerGeometry
from tandem.engine.models.checkpoint import CONFIG_FILE, read_object
from tandem.engine.models.heads.interface import (
    Attention,
    DraftHead,
    HeadTensors,
    Mlp,
    Norm,
    check_layer,
    check_same,
    flag,
    nested,
    placed,
    read_target_ids,
    rotary_of,
    size,
    text_config,
)
from tandem.engine.models.loading import LoadedModel
from tandem.errors import ModelFolderError

_RENAMED = {"model.": "", "layers.0.": "midlayer."}
_STATES = 3
"""States of the target that are read for each token."""


class Eagle3Head(DraftHead):
    """The head's module; its parameters have the published names."""

    def __init__(self, config: HeadConfig, target: LoadedModel) -> None:
        super().__init__()
        size, wide = config.hidden_size, _STATES * config.target_hidden_size
        self.config = config
        self.layer_ids = _layer_ids(config, target)
        self.state_size = size
        self.vocabulary_size = config.vocabulary_size
        self.has_reduced_vocabulary = config.draft_vocabulary_size < config.vocabulary_size
        self.layers = (LayerGeometry(config.kv_heads, config.head_dim, config.head_dim),)
        self.embed_tokens = nn.Embedding(config.vocabulary_size, size)
        self.input_norm = Norm(wide, config.epsilon) if config.norm_before_fc else None
        norms = range(_STATES if config.fc_norm else 0)
        self.fc_norm = nn.ModuleList(Norm(config.target_hidden_size, config.epsilon) for _ in norms)
        self.fc = nn.Linear(wide, size, bias=False)
        self.midlayer = _Layer(config, rotary_of(config, target))
        self.norm = Norm(size, config.epsilon)
        self.lm_head = nn.Linear(size, config.draft_vocabulary_size, bias=False)
        ids = torch.arange(config.draft_vocabulary_size)
        self.register_buffer("target_ids", ids, persistent=False)
        """The target's id of each id of the draft's vocabulary."""

    @property
    def readers(self) -> Sequence[nn.Module]:
        """See `DraftHead`."""
        return (
            [self.fc, self.fc_norm] if self.input_norm is None else [self.fc, self.fc_norm, self.input_norm]
        )

    def combined(self, hidden_states: Sequence[Tensor]) -> Tensor:
        """See `DraftHead`."""
        states = list(hidden_states)
        if len(self.fc_norm):
            states = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
        joined = torch.cat(states, dim=-1)
        combined: Tensor = self.fc(joined if self.input_norm is None else self.input_norm(joined))
        return combined

    def advanced(
        self, token_ids: Tensor, positions: Tensor, states: Tensor, step: Any
    ) -> tuple[Tensor, Tensor]:
        """See `DraftHead`."""
        embedded = self.embed_tokens(token_ids)
        state: Tensor = self.midlayer(embedded, states[None], positions, step)[0]
        normed: Tensor = self.norm(state)
        return normed, normed if self.config.norm_output else state

    def own_logits(self, hidden: Tensor) -> Tensor:
        """See `DraftHead`."""
        own: Tensor = self.lm_head(hidden)
        return own

    def widened(self, own_logits: Tensor) -> Tensor:
        """See `DraftHead`."""
        if not self.has_reduced_vocabulary:
            return own_logits
        scores = own_logits.new_full((len(own_logits), self.vocabulary_size), -torch.inf)
        target_ids: Tensor = self.target_ids  # type: ignore[assignment]  # a registered buffer
        return scores.index_copy_(1, target_ids, own_logits)


class _Layer(nn.Module):
    def __init__(self, config: HeadConfig, rotary: LlamaRotaryEmbedding) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.epsilon)
        self.hidden_norm = Norm(config.hidden_size, config.epsilon)
        self.self_attn = Attention(config, 2 * config.hidden_size, rotary)
        self.post_attention_layernorm = Norm(config.hidden_size, config.epsilon)
        self.mlp = Mlp(config)
        self._norm_before_residual = config.norm_before_residual

    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, step: Any) -> Tensor:
        normed = self.hidden_norm(states)
        residual = normed if self._norm_before_residual else states
        joined = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        attended = residual + self.self_attn(joined, positions, step)
        output: Tensor = attended + self.mlp(self.post_attention_layernorm(attended))
        return output


def load_eagle3(config: HeadConfig, target: LoadedModel) -> Eagle3Head:
    """The head, in the target's dtype and on its device.

    Raises:
        ModelFolderError: a tensor is missing or has another shape than the config says, or the head belongs to another
            target.
    """
    _check_target(config, target)
    tensors = HeadTensors(config.folder, _RENAMED)
    head = Eagle3Head(config, target)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name == "embed_tokens.weight" and name not in tensors:
                parameter.copy_(_target_embedding(config, target))
            else:
                parameter.copy_(tensors.read(name, tuple(parameter.shape), "by config.json"))
    head.target_ids = _target_ids(config, tensors)
    return placed(head, target)


def _target_embedding(config: HeadConfig, target: LoadedModel) -> Tensor:
    module: Any = target.module
    weight: Tensor = module.get_input_embeddings().weight
    if weight.shape[1] != config.hidden_size:
        raise ModelFolderError(
            f"the drafting head in {config.folder} has no embed_tokens.weight, and the target's embedding is "
            f"{weight.shape[1]} wide; it must be as wide as the head, {config.hidden_size}"
        )
    return weight


def _target_ids(config: HeadConfig, tensors: HeadTensors) -> Tensor:
    if config.draft_vocabulary_size == config.vocabulary_size and "d2t" not in tensors:
        return torch.arange(config.draft_vocabulary_size)
    return read_target_ids(tensors, config.folder, config.draft_vocabulary_size, config.vocabulary_size)


def _check_target(config: HeadConfig, target: LoadedModel) -> None:
    for word, own, other in (
        ("vocab_size", config.vocabulary_size, target.info.vocabulary_size),
        ("target_hidden_size", config.target_hidden_size, text_config(target).hidden_size),
    ):
        check_same(config.folder, word, own, other, target)


def _layer_ids(config: HeadConfig, target: LoadedModel) -> tuple[int, ...]:
    count: int = text_config(target).num_hidden_layers
    ids = config.aux_layer_ids or (2, count // 2, count - 3)
    if not all(0 <= each <= count for each in ids):
        raise ModelFolderError(
            f"the drafting head in {config.folder} reads the target's states after {list(ids)} layers; "
            f"{target.info.name} has {count}"
        )
    return ids


EAGLE3 = "eagle3"

_ARCHITECTURES = {
    "LlamaForCausalLMEagle3": EAGLE3,
    "Eagle3LlamaForCausalLM": EAGLE3,
    "Eagle3DraftModel": EAGLE3,
    "Eagle3Speculator": EAGLE3,
}
"""Methods by the first entry of `architectures`; vLLM's registry has the same names."""

_SPECULATORS_TYPE, _LAYER_CONFIG = "speculators_model_type", "transformer_layer_config"
_AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Shape and flags of an EAGLE-3 head."""

    folder: Path
    method: str
    architecture: str
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary_size: int
    draft_vocabulary_size: int
    epsilon: float
    """Added to the mean square in each RMSNorm."""
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...] | None
    """Which of the target's residual streams the head reads, each by the number of layers before it; None for the
    default of the target's depth."""
    norm_before_residual: bool
    """The layer's residual is the normalized state, not the state itself."""
    norm_before_fc: bool
    """One RMSNorm over the concatenated states of the target, before `fc`."""
    fc_norm: bool
    """An RMSNorm for each of the target's states, before they are concatenated."""
    norm_output: bool
    """The next step of a proposal reads the state after the last norm, not before it."""


def is_head(folder: Path) -> bool:
    """True if a folder's config.json names a drafting method. False where there is no such file."""
    if not (folder / CONFIG_FILE).is_file():
        return False
    return _named_method(read_object(folder / CONFIG_FILE, "")) is not None


def read_head_config(folder: Path) -> HeadConfig:
    """The config of a drafting head.

    Raises:
        ModelFolderError: there is none, its format is unknown, or a number in it is missing or wrong.
    """
    path = folder / CONFIG_FILE
    content = read_object(path, "a drafting head needs one")
    method = _named_method(content)
    if method is None:
        raise ModelFolderError(
            f"the file {path} is no drafting head's: speculators_model_type is {content.get(_SPECULATORS_TYPE)!r} and "
            f"architectures is {content.get('architectures')!r}, of which one must name eagle3, as in "
            "LlamaForCausalLMEagle3"
        )
    return _eagle3(path, content, is_wrapped=_SPECULATORS_TYPE in content)


def _named_method(content: Mapping[str, Any]) -> str | None:
    wrapped = content.get(_SPECULATORS_TYPE)
    if wrapped is not None:
        return EAGLE3 if wrapped == EAGLE3 else None
    names = content.get("architectures")
    return _ARCHITECTURES.get(str(names[0])) if isinstance(names, list) and names else None


def _eagle3(path: Path, content: Mapping[str, Any], *, is_wrapped: bool) -> HeadConfig:
    layer = nested(path, content, _LAYER_CONFIG) if is_wrapped else content
    nvidias = content.get("eagle_config")
    flags = {**(nvidias if isinstance(nvidias, dict) else {}), **content}
    check_layer(path, layer, "an EAGLE-3 head")
    hidden_size, heads = size(path, layer, "hidden_size"), size(path, layer, "num_attention_heads")
    vocabulary_size = size(path, layer, "vocab_size")
    return HeadConfig(
        folder=path.parent,
        method=EAGLE3,
        architecture=str((content.get("architectures") or ["Eagle3Speculator"])[0]),
        hidden_size=hidden_size,
        intermediate_size=size(path, layer, "intermediate_size"),
        heads=heads,
        kv_heads=size(path, layer, "num_key_value_heads", heads),
        head_dim=size(path, layer, "head_dim", hidden_size // heads),
        vocabulary_size=vocabulary_size,
        draft_vocabulary_size=size(path, content, "draft_vocab_size", vocabulary_size),
        epsilon=float(layer.get("rms_norm_eps") or 1e-6),
        target_hidden_size=size(path, content, "target_hidden_size", hidden_size),
        aux_layer_ids=_aux_layer_ids(path, flags),
        # vLLM 0.32: absent means true in the speculators format and false in the raw one.
        norm_before_residual=flag(path, flags, "norm_before_residual", default=is_wrapped),
        norm_before_fc=flag(path, flags, "norm_before_fc"),
        fc_norm=flag(path, flags, "fc_norm"),
        norm_output=flag(path, flags, "norm_output"),
    )


def _aux_layer_ids(path: Path, content: Mapping[str, Any]) -> tuple[int, ...] | None:
    ids = content.get(_AUX_LAYERS)
    if ids is None:
        return None
    if not isinstance(ids, list) or len(ids) != 3 or not all(type(each) is int and each >= 0 for each in ids):
        raise ModelFolderError(
            f"the file {path} should have three layer numbers in {_AUX_LAYERS}, but it is {ids!r}"
        )
    return tuple(ids)
