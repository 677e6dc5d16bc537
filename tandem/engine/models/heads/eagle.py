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
from tandem.engine.models.heads.interface import (
    HeadFile,
    HeadLayer,
    HeadTensors,
    LlamaHead,
    LlamaHeadConfig,
    check_target,
    llama_layer,
    placed,
    with_prefix_of,
)
from tandem.engine.models.loading import LoadedModel

_OTHER_FORMATS = ("draft_vocab_size", "medusa_num_heads", "add_para_norm")
"""Keys of heads that are read in other ways; the last is that of HASS."""

_OWNER = "an EAGLE head"
_SPECULATORS_TYPE = "speculators_model_type"
_RENAMED = {"model.": ""}
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
        folder=folder,
        layer=llama_layer(layer, _OWNER),
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


class EagleHead(LlamaHead):
    """The head's module."""

    def __init__(self, config: EagleConfig, target: LoadedModel, *, has_bias: bool) -> None:
        super().__init__(config)
        module: Any = target.module
        size = self.state_size
        self.embedding_layernorm = _norm(config)
        self.fc = nn.Linear(2 * size, size, bias=has_bias)
        self.layer = HeadLayer(config, target, size)
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
    shape = config.layer
    return LlamaRMSNorm(shape.hidden_size, shape.rms_norm_eps) if config.has_norms else nn.Identity()


def load_eagle(config: EagleConfig, target: LoadedModel) -> EagleHead:
    """The head, in the target's dtype and on its device.

    Raises:
        ModelFolderError: a tensor is missing or has another shape than the config says, or the head belongs to another
            target.
    """
    shape = config.layer
    check_target(config.folder, target, hidden_size=shape.hidden_size, vocab_size=shape.vocab_size)
    tensors = HeadTensors(config.folder, _RENAMED)
    head = EagleHead(
        config, target, has_bias=("fc.bias" in tensors) if config.has_bias is None else config.has_bias
    )
    names = _SPECULATORS_NAMES if config.is_speculators else _RAW_NAMES
    head.fill(config, tensors, target, partial(with_prefix_of, names))
    return placed(head, target)
