"""EAGLE (Li et al. 2024, arXiv 2401.15077) and EAGLE-2: one Llama layer that foresees the target's next state.

It reads the token's embedding and the target's final state, and the target's own output layer makes tokens of its
result. The layer's first norm is the identity and there is no norm behind it, except in heads of the speculators format
with `layernorms`. EAGLE-2 has the same heads and drafts trees; proposals here are chains.

Configs and tensor names come in three formats. SafeAILab's config is a Llama config of one layer, and nothing in it
says that it is a head's: the folder's name or the option does. vLLM's `EAGLEConfig` has `model_type` eagle and wraps
that config as `model`. The speculators format (`EagleSpeculatorConfig`) wraps it as `transformer_layer_config`, has the
flags `fusion_bias` and `layernorms`, and tensor names of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tandem.config.names import EAGLE
from tandem.engine.kv_cache.arena import LayerGeometry
from tandem.engine.models.heads.interface import (
    DraftHead,
    HeadFile,
    HeadLayer,
    HeadTensors,
    LlamaHeadConfig,
    check_target,
    llama_layer_shape,
    placed,
    with_prefix_of,
)
from tandem.engine.models.loading import LoadedModel

_OTHER_FORMATS = ("draft_vocab_size", "medusa_num_heads", "add_para_norm")
"""Keys of heads that are read in other ways; the last is that of HASS."""

_OWNER = "an EAGLE head"
_SPECULATORS_TYPE = "speculators_model_type"
_RENAMED = {"model.": ""}
_EMBEDDING = "embed_tokens.weight"
_LAYER = "layer."
_RAW_NAMES = {_LAYER: "layers.0."}
_SPECULATORS_NAMES = {_LAYER: "transformer.", "fc.": "fusion_fc."}


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(LlamaHeadConfig):
    """Shape of an EAGLE head."""

    is_speculators: bool
    """In the speculators format, whose tensors have names of their own."""
    has_bias: bool | None
    """The first layer has a bias; None where the tensors say it."""
    has_norms: bool
    """RMSNorms of the embedding, before the attention, and before the output layer; SafeAILab's heads have none."""


def read_eagle_config(folder: Path) -> EagleConfig:
    """The config of an EAGLE head.

    Raises:
        ModelFolderError: there is none, its format is another one, or a number in it is missing or wrong.
    """
    file = HeadFile.of(folder)
    layer, content = _layer(file), file.content
    for key in _OTHER_FORMATS:
        if content.get(key):
            raise file.refusal(
                f"has {key} {content[key]!r}, which an EAGLE head does not have; it should be a Llama config of one "
                "layer, as SafeAILab publishes it"
            )
    truncated, whole = content.get("truncated_vocab_size"), layer.content.get("vocab_size")
    if truncated not in (None, whole):
        raise file.refusal(
            f"has truncated_vocab_size {truncated!r}; an EAGLE head has the whole vocabulary here, {whole!r}"
        )
    file.flag("bias")
    is_speculators = _SPECULATORS_TYPE in content
    return EagleConfig(
        **llama_layer_shape(layer, _OWNER),
        architecture=file.architecture("EAGLEModel"),
        is_speculators=is_speculators,
        has_bias=file.flag("fusion_bias") if is_speculators else None,
        has_norms=is_speculators and file.flag("layernorms"),
    )


def _layer(file: HeadFile) -> HeadFile:
    if _SPECULATORS_TYPE in file.content:
        file.check(_OWNER, speculators_model_type=EAGLE, transformer_layer_architecture="LlamaDecoderLayer")
        return file.nested("transformer_layer_config")
    return file.nested("model") if isinstance(file.content.get("model"), dict) else file


class EagleHead(DraftHead):
    """The head's module."""

    def __init__(self, config: EagleConfig, target: LoadedModel, *, has_bias: bool) -> None:
        super().__init__()
        module: Any = target.module
        self.architecture = config.architecture
        self.state_size = config.hidden_size
        self.vocabulary_size = config.vocabulary_size
        self.layers = (LayerGeometry(config.kv_heads, config.head_dim, config.head_dim),)
        self.embed_tokens = nn.Embedding(config.vocabulary_size, config.hidden_size, device="meta")
        """Set by `load_eagle`: often the target's own tensor."""
        self.embedding_layernorm = _norm(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=has_bias)
        self.layer = HeadLayer(config, target, config.hidden_size)
        self.layer.input_layernorm = _norm(config)  # type: ignore[assignment]
        self.pre_lm_head_layernorm = _norm(config)
        # Not a submodule: it belongs to the target, which may replace its weights by packed ones.
        self._output = (module.get_output_embeddings(),)

    def advanced(
        self, token_ids: Tensor, positions: Tensor, states: Tensor, step: Any
    ) -> tuple[Tensor, Tensor]:
        """See `DraftHead`. The layer's result stands for the target's next state."""
        embedded = self.embedding_layernorm(self.embed_tokens(token_ids))
        joined = torch.cat((embedded, states[None]), dim=-1)
        residual = self.fc(joined)
        state = self.layer.computed(residual, self.layer.input_layernorm(residual), positions, step)[0]
        # The next step reads the state before this norm, as in the training of such heads.
        return self.pre_lm_head_layernorm(state), state

    def own_logits(self, hidden: Tensor) -> Tensor:
        """See `DraftHead`; by the target's output layer, without what some models do to its result."""
        logits: Tensor = self._output[0](hidden)
        return logits


def _norm(config: EagleConfig) -> nn.Module:
    return LlamaRMSNorm(config.hidden_size, config.epsilon) if config.has_norms else nn.Identity()


def load_eagle(config: EagleConfig, target: LoadedModel) -> EagleHead:
    """The head, in the target's dtype and on its device.

    Raises:
        ModelFolderError: a tensor is missing or has another shape than the config says, or the head belongs to another
            target.
    """
    check_target(config.folder, target, hidden_size=config.hidden_size, vocab_size=config.vocabulary_size)
    tensors = HeadTensors(config.folder, _RENAMED)
    head = EagleHead(
        config, target, has_bias=("fc.bias" in tensors) if config.has_bias is None else config.has_bias
    )
    head.embed_tokens.weight = nn.Parameter(_embedding(config, tensors, target), requires_grad=False)
    names = _SPECULATORS_NAMES if config.is_speculators else _RAW_NAMES
    tensors.fill(head, partial(with_prefix_of, names), but=_EMBEDDING)
    return placed(head, target)


def _embedding(config: EagleConfig, tensors: HeadTensors, target: LoadedModel) -> Tensor:
    """The head's own, or the target's where it has none or the same: published heads bring a copy of it."""
    module: Any = target.module
    targets: Tensor = module.get_input_embeddings().weight.detach()
    if _EMBEDDING not in tensors:
        return targets
    shape = (config.vocabulary_size, config.hidden_size)
    own = tensors.read(_EMBEDDING, shape).to(targets.device, targets.dtype)
    return targets if torch.equal(own, targets) else own
