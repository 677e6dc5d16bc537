"""EAGLE (Li et al. 2024, arXiv 2401.15077) and EAGLE-2: one Llama layer that foresees the target's next state.

It reads the token's embedding and the target's final state, and the target's own output layer makes tokens of its
result. The layer's first norm is the identity and there is no norm behind it, except in heads of the speculators format
with `layernorms`. Tensor names are those of SafeAILab's checkpoints or of speculators' `EagleSpeculator`. EAGLE-2 has
the same heads and drafts trees; proposals here are chains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tandem.config.names import EAGLE
from tandem.engine.kv_cache.arena import LayerGeometry
from tandem.engine.models.checkpoint import CONFIG_FILE, read_object
from tandem.engine.models.heads.interface import (
    FINAL_STATE,
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
    rotary_of,
    size,
    text_config,
)
from tandem.engine.models.loading import LoadedModel
from tandem.errors import ModelFolderError

_RENAMED = {"model.": ""}
_EMBEDDING = "embed_tokens.weight"
_LAYER = "layer."
_RAW_NAMES = {_LAYER: "layers.0."}
_SPECULATORS_NAMES = {_LAYER: "transformer.", "fc.": "fusion_fc."}


class EagleHead(DraftHead):
    """The head's module."""

    def __init__(self, config: EagleConfig, target: LoadedModel, *, has_bias: bool) -> None:
        """
        Args:
            config: the head's.
            target: the model, whose output layer the head uses as well.
            has_bias: the first layer, `fc`, has a bias.
        """
        super().__init__()
        module: Any = target.module
        self.config = config
        self.layer_ids = (FINAL_STATE,)
        self.state_size = config.hidden_size
        self.vocabulary_size = config.vocabulary_size
        self.has_reduced_vocabulary = False
        self.layers = (LayerGeometry(config.kv_heads, config.head_dim, config.head_dim),)
        self.embed_tokens = nn.Embedding(config.vocabulary_size, config.hidden_size, device="meta")
        """Set by `load_eagle`: often the target's own tensor."""
        self.embedding_layernorm = _norm(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=has_bias)
        self.layer = _Layer(config, Attention(config, config.hidden_size, rotary_of(config, target)))
        self.pre_lm_head_layernorm = _norm(config)
        # Not a submodule: it belongs to the target, which may replace its weights by packed ones.
        self._output = (module.get_output_embeddings(),)

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
        """See `DraftHead`. The layer's result stands for the target's next state."""
        embedded = _normed(self.embedding_layernorm, self.embed_tokens(token_ids))
        joined = torch.cat((embedded, states[None]), dim=-1)
        state: Tensor = self.layer(self.fc(joined), positions, step)[0]
        # The next step reads the state before this norm, as in the training of such heads.
        return _normed(self.pre_lm_head_layernorm, state), state

    def own_logits(self, hidden: Tensor) -> Tensor:
        """See `DraftHead`; by the target's output layer, without what some models do to its result."""
        logits: Tensor = self._output[0](hidden)
        return logits


class _Layer(nn.Module):
    def __init__(self, config: EagleConfig, attention: Attention) -> None:
        super().__init__()
        self.input_layernorm = _norm(config)
        self.self_attn = attention
        self.post_attention_layernorm = Norm(config.hidden_size, config.epsilon)
        self.mlp = Mlp(config)

    def forward(self, states: Tensor, positions: Tensor, step: Any) -> Tensor:
        attended = states + self.self_attn(_normed(self.input_layernorm, states), positions, step)
        output: Tensor = attended + self.mlp(self.post_attention_layernorm(attended))
        return output


def _norm(config: EagleConfig) -> Norm | None:
    return Norm(config.hidden_size, config.epsilon) if config.has_norms else None


def _normed(norm: Norm | None, states: Tensor) -> Tensor:
    if norm is None:
        return states
    output: Tensor = norm(states)
    return output


def load_eagle(config: EagleConfig, target: LoadedModel) -> EagleHead:
    """The head, in the target's dtype and on its device.

    Raises:
        ModelFolderError: a tensor is missing or has another shape than the config says, or the head belongs to another
            target.
    """
    for key, own, other in (
        ("hidden_size", config.hidden_size, text_config(target).hidden_size),
        ("vocab_size", config.vocabulary_size, target.info.vocabulary_size),
    ):
        check_same(config.folder, key, own, other, target)
    tensors = HeadTensors(config.folder, _RENAMED)
    has_bias = "fc.bias" in tensors if config.has_bias is None else config.has_bias
    head = EagleHead(config, target, has_bias=has_bias)
    head.embed_tokens.weight = nn.Parameter(_embedding(config, tensors, target), requires_grad=False)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name != _EMBEDDING:
                published = _published(name, config)
                parameter.copy_(tensors.read(published, tuple(parameter.shape), "by config.json"))
    return placed(head, target)


def _published(name: str, config: EagleConfig) -> str:
    """A parameter's name in the checkpoint."""
    names = _SPECULATORS_NAMES if config.is_speculators else _RAW_NAMES
    prefix = next((each for each in names if name.startswith(each)), "")
    return names.get(prefix, "") + name.removeprefix(prefix)


def _embedding(config: EagleConfig, tensors: HeadTensors, target: LoadedModel) -> Tensor:
    """The head's own, or the target's where it has none or the same: published heads bring a copy of it."""
    module: Any = target.module
    targets: Tensor = module.get_input_embeddings().weight.detach()
    if _EMBEDDING not in tensors:
        return targets
    shape = (config.vocabulary_size, config.hidden_size)
    own = tensors.read(_EMBEDDING, shape, "by config.json").to(targets.device, targets.dtype)
    return targets if torch.equal(own, targets) else own


_OTHER_FORMATS = ("draft_vocab_size", "medusa_num_heads", "add_para_norm")
"""Keys of heads that are read in other ways; the last is that of HASS."""

_SPECULATORS_TYPE, _LAYER_CONFIG = "speculators_model_type", "transformer_layer_config"
_LAYER, _LAYER_KEY = "LlamaDecoderLayer", "transformer_layer_architecture"


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Shape of an EAGLE head."""

    folder: Path
    architecture: str
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary_size: int
    epsilon: float
    """Added to the mean square in each RMSNorm."""
    is_speculators: bool
    """In the speculators format, whose tensors have names of their own."""
    has_bias: bool | None
    """The first layer has a bias; None where the tensors say it."""
    has_norms: bool
    """RMSNorms of the embedding, before the attention, and before the output layer; SafeAILab's heads have none."""
    method: str = EAGLE


def read_eagle_config(folder: Path) -> EagleConfig:
    """The config of an EAGLE head.

    Raises:
        ModelFolderError: there is none, its format is another one, or a number in it is missing or wrong.
    """
    path = folder / CONFIG_FILE
    content = read_object(path, "a drafting head needs one")
    is_speculators = _SPECULATORS_TYPE in content
    layer = _layer(path, content, is_speculators=is_speculators)
    _check_format(path, content, layer)
    hidden_size, heads = size(path, layer, "hidden_size"), size(path, layer, "num_attention_heads")
    architectures = content.get("architectures")
    return EagleConfig(
        folder=folder,
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else "EAGLEModel",
        hidden_size=hidden_size,
        intermediate_size=size(path, layer, "intermediate_size"),
        heads=heads,
        kv_heads=size(path, layer, "num_key_value_heads", heads),
        head_dim=size(path, layer, "head_dim", hidden_size // heads),
        vocabulary_size=size(path, layer, "vocab_size"),
        epsilon=float(layer.get("rms_norm_eps") or 1e-6),
        is_speculators=is_speculators,
        has_bias=flag(path, content, "fusion_bias") if is_speculators else None,
        has_norms=is_speculators and flag(path, content, "layernorms"),
    )  # fmt: skip


def _layer(path: Path, content: Mapping[str, Any], *, is_speculators: bool) -> Mapping[str, Any]:
    """The config of the head's one layer."""
    if not is_speculators:
        wrapped = content.get("model")
        return wrapped if isinstance(wrapped, dict) else content
    if content[_SPECULATORS_TYPE] != EAGLE:
        raise ModelFolderError(
            f"the file {path} has {_SPECULATORS_TYPE} {content[_SPECULATORS_TYPE]!r}; that of an EAGLE head must be "
            f"{EAGLE!r}"
        )
    if content.get(_LAYER_KEY) not in (None, _LAYER):
        raise ModelFolderError(
            f"the file {path} has {_LAYER_KEY} {content[_LAYER_KEY]!r}; an EAGLE head has {_LAYER!r} here"
        )
    return nested(path, content, _LAYER_CONFIG)


def _check_format(path: Path, content: Mapping[str, Any], layer: Mapping[str, Any]) -> None:
    for key in _OTHER_FORMATS:
        if content.get(key):
            raise ModelFolderError(
                f"the file {path} has {key} {content[key]!r}, which an EAGLE head does not have; it should be a Llama "
                "config of one layer, as SafeAILab publishes it"
            )
    truncated, whole = content.get("truncated_vocab_size"), layer.get("vocab_size")
    if truncated not in (None, whole):
        raise ModelFolderError(
            f"the file {path} has truncated_vocab_size {truncated!r}; an EAGLE head has the whole vocabulary here, "
            f"{whole!r}"
        )
    flag(path, content, "bias")
    check_layer(path, layer, "an EAGLE head")
