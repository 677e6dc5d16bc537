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
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tandem.config.names import EAGLE3
from tandem.engine.models.heads.interface import (
    HeadFile,
    HeadLayer,
    HeadTensors,
    LlamaHead,
    LlamaHeadConfig,
    check_layer_ids,
    check_target,
    llama_layer,
    placed,
    text_config,
)
from tandem.engine.models.loading import LoadedModel

_ARCHITECTURES = (
    "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator",
)  # fmt: skip
"""First entries of `architectures`, as in vLLM's registry."""

_SPECULATORS_TYPE = "speculators_model_type"
_AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
_RENAMED = {"model.": "", "layers.0.": "midlayer."}
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
        self.midlayer = _Layer(config, target)
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

    def advanced(
        self, token_ids: Tensor, positions: Tensor, states: Tensor, step: Any
    ) -> tuple[Tensor, Tensor]:
        embedded = self.embed_tokens(token_ids)
        state: Tensor = self.midlayer(embedded, states[None], positions, step)[0]
        normed: Tensor = self.norm(state)
        return normed, normed if self.config.norm_output else state


class _Layer(HeadLayer):  # type: ignore[no-untyped-call]  # its base's hook for subclasses is untyped
    def __init__(self, config: Eagle3Config, target: LoadedModel) -> None:
        shape = config.layer
        super().__init__(config, target, 2 * shape.hidden_size)
        self.hidden_norm = LlamaRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self._norm_before_residual = config.norm_before_residual

    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, step: Any) -> Tensor:  # type: ignore[override]
        normed = self.hidden_norm(states)
        joined = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        return self.computed(normed if self._norm_before_residual else states, joined, positions, step)


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
    tensors = HeadTensors(config.folder, _RENAMED)
    head = Eagle3Head(config, target)
    check_layer_ids(config.folder, head.layer_ids, target)
    head.fill(config, tensors, target)
    if config.draft_vocabulary_size != vocabulary_size or "d2t" in tensors:
        ids = tensors.target_ids("d2t", config.draft_vocabulary_size, vocabulary_size, are_offsets=True)
        head.target_ids = None if ids.tolist() == list(range(vocabulary_size)) else ids
    return placed(head, target)
