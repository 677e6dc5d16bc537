"""EAGLE, EAGLE-2 and EAGLE-3: one Llama layer that foresees the target's next state.

EAGLE (Li et al. 2024, arXiv 2401.15077) reads the token's embedding and the target's final state, and the target's own
output layer makes tokens of its result. The layer's first norm is the identity and there is no norm behind it, except
in heads of the speculators format with `layernorms`. EAGLE-2 has the same heads and drafts trees; proposals here are
chains. EAGLE-3 (Li et al. 2025, arXiv 2503.01840) reads three of the target's states, and has an output layer of its
own.

Configs and tensor names come in three formats. SafeAILab's config is a Llama config of one layer, and nothing in that
of an EAGLE head says that it is a head's: the folder's name or the option does. vLLM's `EAGLEConfig` has `model_type`
eagle and wraps that config as `model`. The speculators format wraps it as `transformer_layer_config`, and has flags and
tensor names of its own. Those of EAGLE-3 are read as vLLM 0.32 reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tandem.config.names import EAGLE, EAGLE3
from tandem.engine.models.heads.interface import (
    HeadFile,
    HeadLayer,
    HeadTensors,
    LlamaHead,
    LlamaHeadConfig,
    PassStates,
    check_layer_ids,
    check_target,
    llama_layer,
    placed,
    text_config,
    with_prefix_of,
)
from tandem.engine.models.loading import LoadedModel

_SPECULATORS_TYPE = "speculators_model_type"

_OTHER_FORMATS = ("draft_vocab_size", "medusa_num_heads", "add_para_norm")
"""Keys of heads that are read in other ways; the last is that of HASS."""

_OWNER = "an EAGLE head"
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

    def advanced(self, token_ids: Tensor, positions: Tensor, states: Tensor, step: Any) -> PassStates:
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


_ARCHITECTURES = (
    "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator",
)  # fmt: skip
"""First entries of `architectures`, as in vLLM's registry."""

_AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
_EAGLE3_RENAMED = {"model.": "", "layers.0.": "midlayer."}
_STATES = 3
"""States of the target that are read for each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(LlamaHeadConfig):
    """Shape and flags of an EAGLE-3 head."""

    draft_vocabulary_size: int
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...] | None
    """Residual streams of the target that the head reads, each by the number of layers before it; None for the
    default of the target's depth."""
    norm_before_residual: bool
    """The layer's residual is the normalized state, not the state itself."""
    norm_before_fc: bool
    """One RMSNorm over the concatenated states of the target, before `fc`."""
    fc_norm: bool
    """An RMSNorm for each of the target's states, before they are concatenated."""
    norm_output: bool
    """The next step of a proposal reads the state after the last norm, not before it."""


def _is_eagle3(content: Mapping[str, Any]) -> bool:
    if _SPECULATORS_TYPE in content:
        return bool(content[_SPECULATORS_TYPE] == EAGLE3)
    names = content.get("architectures")
    return isinstance(names, list) and bool(names) and names[0] in _ARCHITECTURES


def read_eagle3_config(folder: Path) -> Eagle3Config:
    """The config of an EAGLE-3 head.

    Raises:
        ModelFolderError: there is none, its format is unknown, or a number in it is missing or wrong.
    """
    file = HeadFile.of(folder)
    if not _is_eagle3(file.content):
        raise file.refusal(
            f"is no EAGLE-3 head's: {_SPECULATORS_TYPE} is {file.content.get(_SPECULATORS_TYPE)!r} and architectures "
            f"is {file.content.get('architectures')!r}, of which one must name eagle3, as in {_ARCHITECTURES[0]}"
        )
    is_wrapped = _SPECULATORS_TYPE in file.content
    layer: Any = llama_layer(
        file.nested("transformer_layer_config") if is_wrapped else file, "an EAGLE-3 head"
    )
    nvidias = file.content.get("eagle_config")
    flags = HeadFile(file.path, {**(nvidias if isinstance(nvidias, dict) else {}), **file.content})
    aux_layer_ids = None if flags.content.get(_AUX_LAYERS) is None else flags.layer_ids(_AUX_LAYERS)
    if aux_layer_ids is not None and len(aux_layer_ids) != _STATES:
        raise file.refusal(f"should have {_STATES} layer numbers in {_AUX_LAYERS}, but it is {aux_layer_ids}")
    return Eagle3Config(
        folder=folder,
        layer=layer,
        architecture=file.architecture("Eagle3Speculator"),
        draft_vocabulary_size=file.number("draft_vocab_size", layer.vocab_size),
        target_hidden_size=file.number("target_hidden_size", layer.hidden_size),
        aux_layer_ids=aux_layer_ids,
        # vLLM 0.32: absent means true in the speculators format and false in the raw one.
        norm_before_residual=flags.flag("norm_before_residual", default=is_wrapped),
        norm_before_fc=flags.flag("norm_before_fc"),
        fc_norm=flags.flag("fc_norm"),
        norm_output=flags.flag("norm_output"),
    )


class Eagle3Head(LlamaHead):
    """The head's module; its parameters have the published names."""

    def __init__(self, config: Eagle3Config, target: LoadedModel) -> None:
        super().__init__(config)
        size, wide, epsilon = self.state_size, _STATES * config.target_hidden_size, config.layer.rms_norm_eps
        count: int = text_config(target).num_hidden_layers
        self.config = config
        self.layer_ids = config.aux_layer_ids or (2, count // 2, count - 3)
        self.input_norm = LlamaRMSNorm(wide, epsilon) if config.norm_before_fc else None
        norms = range(_STATES if config.fc_norm else 0)
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(config.target_hidden_size, epsilon) for _ in norms)
        self.fc = nn.Linear(wide, size, bias=False)
        self.midlayer = HeadLayer(config, target, 2 * size)
        self.midlayer.hidden_norm = LlamaRMSNorm(size, epsilon)
        self.norm = LlamaRMSNorm(size, epsilon)
        self.lm_head = nn.Linear(size, config.draft_vocabulary_size, bias=False)

    @property
    def readers(self) -> Sequence[nn.Module]:
        readers = (self.fc, self.fc_norm, self.input_norm)
        return [module for module in readers if module is not None]

    def combined(self, hidden_states: Sequence[Tensor]) -> Tensor:
        states = list(hidden_states)
        if len(self.fc_norm):
            states = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
        joined = torch.cat(states, dim=-1)
        combined: Tensor = self.fc(joined if self.input_norm is None else self.input_norm(joined))
        return combined

    def advanced(self, token_ids: Tensor, positions: Tensor, states: Tensor, step: Any) -> PassStates:
        layer: Any = self.midlayer
        normed = layer.hidden_norm(states[None])
        inputs = torch.cat((layer.input_layernorm(self.embed_tokens(token_ids)), normed), dim=-1)
        residual = normed if self.config.norm_before_residual else states[None]
        state: Tensor = layer.computed(residual, inputs, positions, step)[0]
        output: Tensor = self.norm(state)
        return output, output if self.config.norm_output else state


def load_eagle3(config: Eagle3Config, target: LoadedModel) -> Eagle3Head:
    """The head, in the target's dtype and on its device.

    Raises:
        ModelFolderError: a tensor is missing or has another shape than the config says, or the head belongs to another
            target.
    """
    vocabulary_size: int = config.layer.vocab_size
    check_target(
        config.folder, target, vocab_size=vocabulary_size, target_hidden_size=config.target_hidden_size
    )
    tensors = HeadTensors(config.folder, _EAGLE3_RENAMED)
    head = Eagle3Head(config, target)
    check_layer_ids(config.folder, head.layer_ids, target)
    head.fill(config, tensors, target)
    if config.draft_vocabulary_size != vocabulary_size or "d2t" in tensors:
        ids = tensors.target_ids("d2t", config.draft_vocabulary_size, vocabulary_size, are_offsets=True)
        head.target_ids = None if ids.tolist() == list(range(vocabulary_size)) else ids
    return placed(head, target)
