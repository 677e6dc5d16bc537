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

from collections.abc import Container, Mapping, Sequence
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
    PassStates,
    text_config,
)
from tandem.engine.models.loading import LoadedModel

_SPECULATORS_TYPE = "speculators_model_type"

_OTHER_FORMATS = ("draft_vocab_size", "medusa_num_heads", "add_para_norm")
"""Keys of heads that are read in other ways; the last is that of HASS."""
_OWNER = "an EAGLE head"


class EagleHead(LlamaHead):
    """An EAGLE head."""

    renamed: Mapping[str, str] = {"model.": ""}

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        file = self.file
        content = self.file.content
        layer = _layer(file)
        for key in _OTHER_FORMATS:
            if content.get(key):
                raise file.refusal(
                    f"has {key} {content[key]!r}, which an EAGLE head does not have; it should be a Llama config of "
                    "one layer, as SafeAILab publishes it"
                )
        truncated = content.get("truncated_vocab_size")
        whole = layer.content.get("vocab_size")
        if truncated not in (None, whole):
            raise file.refusal(
                f"has truncated_vocab_size {truncated!r}; an EAGLE head has the whole vocabulary here, {whole!r}"
            )
        file.flag("bias")
        self.take_shape(layer, _OWNER)
        self.expected["hidden_size"] = self.state_size
        self.architecture = file.architecture("EAGLEModel")
        self.written = {"layer.": "layers.0."}
        self.has_bias: bool | None = None
        """The first layer has a bias; None where the tensors say it."""
        self.has_norms = False
        """RMSNorms of the embedding, before the attention, and before the output layer; SafeAILab's heads have none."""
        if _SPECULATORS_TYPE in content:
            self.written = {"layer.": "transformer.", "fc.": "fusion_fc."}
            self.has_bias = file.flag("fusion_bias")
            self.has_norms = file.flag("layernorms")

    def build(self, target: LoadedModel, tensors: Container[str] = ()) -> None:
        super().build(target)
        module: Any = target.module
        size = self.state_size
        has_bias = "fc.bias" in tensors if self.has_bias is None else self.has_bias
        self.embedding_layernorm = self._norm()
        self.fc = nn.Linear(2 * size, size, bias=has_bias)
        self.layer = HeadLayer(self.shape, target, size)
        self.layer.input_layernorm = self._norm()  # type: ignore[assignment]
        self.pre_lm_head_layernorm = self._norm()
        # Not a submodule: it belongs to the target, which may replace its weights by packed ones.
        self._output = (module.get_output_embeddings(),)

    def _norm(self) -> nn.Module:
        return LlamaRMSNorm(self.state_size, self.shape.rms_norm_eps) if self.has_norms else nn.Identity()

    def advance(self, token_ids: Tensor, positions: Tensor, states: Tensor, step: Any) -> PassStates:
        """See `DraftHead`. The layer's result stands for the target's next state."""
        embedded = self.embedding_layernorm(self.embed_tokens(token_ids))
        joined = torch.cat((embedded, states[None]), dim=-1)
        residual = self.fc(joined)
        state = self.layer.compute(residual, self.layer.input_layernorm(residual), positions, step)[0]
        # The next step reads the state before this norm, as in the training of such heads.
        return self.pre_lm_head_layernorm(state), state

    def own_logits(self, hidden: Tensor) -> Tensor:
        """See `DraftHead`; by the target's output layer, without what some models do to its result."""
        logits: Tensor = self._output[0](hidden)
        return logits


def _layer(file: HeadFile) -> HeadFile:
    if _SPECULATORS_TYPE in file.content:
        file.check(_OWNER, speculators_model_type=EAGLE, transformer_layer_architecture="LlamaDecoderLayer")
        return file.read_nested("transformer_layer_config")
    return file.read_nested("model") if isinstance(file.content.get("model"), dict) else file


_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator")
"""First entries of `architectures`, as in vLLM's registry."""

_AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
_STATES = 3


class Eagle3Head(LlamaHead):
    """An EAGLE-3 head; its parameters have the published names."""

    renamed: Mapping[str, str] = {"model.": "", "layers.0.": "midlayer."}

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        file = self.file
        names = self.file.content.get("architectures")
        kind = file.content.get(_SPECULATORS_TYPE)
        is_wrapped = _SPECULATORS_TYPE in file.content
        is_named = isinstance(names, list) and bool(names) and names[0] in _ARCHITECTURES
        if kind != EAGLE3 if is_wrapped else not is_named:
            raise file.refusal(
                f"is no EAGLE-3 head's: {_SPECULATORS_TYPE} is {kind!r} and architectures is {names!r}, of which one "
                f"must name eagle3, as in {_ARCHITECTURES[0]}"
            )
        self.take_shape(
            file.read_nested("transformer_layer_config") if is_wrapped else file, "an EAGLE-3 head"
        )
        self.architecture = file.architecture("Eagle3Speculator")
        self.draft_vocabulary_size = file.number("draft_vocab_size", self.vocabulary_size)
        self.target_size = file.number("target_hidden_size", self.state_size)
        self.expected["target_hidden_size"] = self.target_size
        nvidias = file.content.get("eagle_config")
        flags = HeadFile(file.path, {**(nvidias if isinstance(nvidias, dict) else {}), **file.content})
        self.layer_ids = () if flags.content.get(_AUX_LAYERS) is None else flags.layer_ids(_AUX_LAYERS)
        """Where the config leaves them open, `build` takes the default of the target's depth."""
        if len(self.layer_ids) not in (0, _STATES):
            raise file.refusal(
                f"should have {_STATES} layer numbers in {_AUX_LAYERS}, but it is {self.layer_ids}"
            )
        # vLLM 0.32: absent means true in the speculators format and false in the raw one.
        self.norm_before_residual = flags.flag("norm_before_residual", default=is_wrapped)
        """The layer's residual is the normalized state, not the state itself."""
        self.norm_before_fc = flags.flag("norm_before_fc")
        """One RMSNorm over the concatenated states of the target, before `fc`."""
        self.norm_each = flags.flag("fc_norm")
        """An RMSNorm for each of the target's states, before they are concatenated."""
        self.norm_output = flags.flag("norm_output")
        """The next step of a proposal reads the state after the last norm, not before it."""

    def build(self, target: LoadedModel, tensors: Container[str] = ()) -> None:
        super().build(target)
        size = self.state_size
        wide = _STATES * self.target_size
        epsilon = self.shape.rms_norm_eps
        count: int = text_config(target).num_hidden_layers
        self.layer_ids = self.layer_ids or (2, count // 2, count - 3)
        self.input_norm = LlamaRMSNorm(wide, epsilon) if self.norm_before_fc else None
        norms = range(_STATES if self.norm_each else 0)
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(self.target_size, epsilon) for _ in norms)
        self.fc = nn.Linear(wide, size, bias=False)
        self.midlayer = HeadLayer(self.shape, target, 2 * size)
        self.midlayer.hidden_norm = LlamaRMSNorm(size, epsilon)
        self.norm = LlamaRMSNorm(size, epsilon)
        self.lm_head = nn.Linear(size, self.draft_vocabulary_size, bias=False)
        readers = (self.fc, self.fc_norm, self.input_norm)
        self.readers = [module for module in readers if module is not None]

    def read(self, target: LoadedModel, tensors: HeadTensors) -> None:
        super().read(target, tensors)
        if self.draft_vocabulary_size != self.vocabulary_size or "d2t" in tensors:
            count = self.draft_vocabulary_size
            ids = tensors.target_ids("d2t", count, self.vocabulary_size, are_offsets=True)
            self.target_ids = None if ids.tolist() == list(range(self.vocabulary_size)) else ids

    def combine(self, hidden_states: Sequence[Tensor]) -> Tensor:
        norms = self.fc_norm or [nn.Identity()] * _STATES
        joined = torch.cat([norm(state) for norm, state in zip(norms, hidden_states, strict=True)], dim=-1)
        combined: Tensor = self.fc(joined if self.input_norm is None else self.input_norm(joined))
        return combined

    def advance(self, token_ids: Tensor, positions: Tensor, states: Tensor, step: Any) -> PassStates:
        layer: Any = self.midlayer
        normed = layer.hidden_norm(states[None])
        inputs = torch.cat((layer.input_layernorm(self.embed_tokens(token_ids)), normed), dim=-1)
        residual = normed if self.norm_before_residual else states[None]
        state: Tensor = layer.compute(residual, inputs, positions, step)[0]
        output: Tensor = self.norm(state)
        return output, output if self.norm_output else state
