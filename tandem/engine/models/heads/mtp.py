"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): a layer in the target's own checkpoint drafts.

The layer reads the token's embedding and the target's state after the last norm, each normalized, and shares the
target's embedding and output head. It is transformers' own module (`transformers.modeling_layers.MtpLayer`). A proposal
of several tokens uses the first MTP layer again and again, as vLLM does where a checkpoint has one; each time it reads
the normalized state that it gave before, as in transformers and SGLang.

DeepSeek-V3 and GLM-4.5 store such layers behind the model's last layer: `model.layers.{layers}.` and so on. Qwen3-Next
stores its one beside the model, as `mtp.`, and its config does not mention it; it computes the same around one of the
model's blocks with full attention (as vLLM's `Qwen3NextMultiTokenPredictor` reads it). Models of Qwen3 are read in that
layout too, around a block of Qwen3.
"""

from __future__ import annotations

import copy
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import MtpLayer, MtpModel

from tandem.config.names import MTP
from tandem.engine.models.attention import STEP_ARGUMENT
from tandem.engine.models.checkpoint import find_weights
from tandem.engine.models.heads.interface import (
    DraftHead,
    HeadFile,
    HeadTensors,
    PassStates,
    shared_layers,
    text_config,
    with_prefix_of,
)
from tandem.engine.models.loading import LoadedModel
from tandem.errors import ModelFolderError

_APPENDED_FAMILIES = ("deepseek_v3", "glm4_moe")
_SEPARATE_FAMILIES = ("qwen3", "qwen3_moe", "qwen3_next")
"""Model families, by `model_type`."""

_SEPARATE_PREFIX = "mtp."
_FIRST_TENSOR = f"{_SEPARATE_PREFIX}fc.weight"
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys of the number of layers; the second is that of Qwen's later models."""

_EXPERTS = "mlp.experts."
_APPENDED_NAMES = {"mtp_block.": "", "post_norm.": "shared_head.norm."}
_SEPARATE_NAMES = {
    "enorm.": "pre_fc_norm_embedding.", "hnorm.": "pre_fc_norm_hidden.", "eh_proj.": "fc.", "mtp_block.": "layers.0.",
    "post_norm.": "norm.",
}  # fmt: skip
"""Beginnings of names in transformers' module, and those in a checkpoint behind its prefix."""


class MtpHead(DraftHead):
    """A target's first MTP layer, whose config and tensors are the target's own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        file = self.file
        family = self.file.content.get("model_type")
        self.is_separate = family in _SEPARATE_FAMILIES
        """Named as Qwen3-Next's, and no layer of the model's own numbering."""
        self.prefix = _SEPARATE_PREFIX
        if family in _APPENDED_FAMILIES:
            _check_count(file, _COUNTS[0])
            file.number("n_routed_experts")
            self.prefix = f"model.layers.{file.number('num_hidden_layers')}."
        elif self.is_separate:
            for key in _COUNTS:
                if file.content.get(key) is not None:
                    _check_count(file, key)
            if _FIRST_TENSOR not in find_weights(folder).names:
                raise _without_layers(file, f"it has no tensor {_FIRST_TENSOR}")
        else:
            raise file.refusal(
                f"has the model_type {family!r}; the method mtp needs a model with layers for multi-token prediction, "
                f"and here that is one of {', '.join((*_APPENDED_FAMILIES, *_SEPARATE_FAMILIES))}"
            )

    def build(self, target: LoadedModel, tensors: Container[str] = ()) -> None:
        module: Any = target.module
        self.architecture = f"{target.info.architecture} ({MTP})"
        self.state_size = text_config(target).hidden_size
        self.vocabulary_size = target.info.vocabulary_size
        self.layers = (replace(target.layers[-1], window=None),)
        with torch.device("meta"):
            self.layer: nn.Module = (
                _separate_layer(target) if self.is_separate else MtpModel(module, 1).layers[0]
            )
        self.embed_tokens, self.lm_head = shared_layers(target)
        self.rotary_emb: nn.Module = module.get_decoder().rotary_emb

    def read(self, target: LoadedModel, tensors: HeadTensors) -> None:
        kept_as_stored = {name for name, _ in self.layer.named_buffers()}
        found: dict[str, Tensor] = {}
        for name, wanted in self.layer.state_dict().items():
            # The router's bias decides between close scores; transformers keeps it in float32 as well.
            dtype = wanted.dtype if name in kept_as_stored else target.dtype
            found[name] = self.convert(name, wanted, tensors).to(target.device, dtype)
        self.layer.load_state_dict(found, assign=True)

    def convert(self, name: str, parameter: Tensor, tensors: HeadTensors) -> Tensor:
        """See `DraftHead`. transformers keeps the experts of a layer in one tensor, checkpoints each by itself."""
        names = _SEPARATE_NAMES if self.is_separate else _APPENDED_NAMES
        published = self.prefix + with_prefix_of(names, name)
        layer, is_of_experts, part = published.partition(_EXPERTS)
        if not is_of_experts or published in tensors:
            return tensors.read(published, parameter.shape)
        experts, rows, columns = parameter.shape
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        beginnings = [f"{layer}{_EXPERTS}{expert}." for expert in range(experts)]
        wanted = (rows // len(parts), columns)
        stored = [tensors.read(f"{own}{each}.weight", wanted) for own in beginnings for each in parts]
        return torch.cat(stored).view(parameter.shape)

    def advance(self, token_ids: Tensor, positions: Tensor, states: Tensor, step: Any) -> PassStates:
        embedded = self.embed_tokens(token_ids)
        output: Tensor = self.layer(
            embedded,
            states[None],
            position_embeddings=self.rotary_emb(embedded, position_ids=positions),
            attention_mask=None,
            position_ids=positions,
            past_key_values=None,
            **{STEP_ARGUMENT: step},
        )
        return output[0], output[0]


def _separate_layer(target: LoadedModel) -> nn.Module:
    """Around a block like the target's last one, with full attention and numbered 0, as in vLLM."""
    module: Any = target.module
    last = module.get_decoder().layers[-1]
    config = copy.deepcopy(text_config(target))
    config.layer_types = ["full_attention"]
    return MtpLayer(config, type(last), type(last.input_layernorm), 0)


def _check_count(file: HeadFile, key: str) -> None:
    count = file.content.get(key)
    if not isinstance(count, int) or count < 1:
        raise _without_layers(file, f"{key} is {count!r}; it must be at least 1")


def _without_layers(file: HeadFile, why: str) -> ModelFolderError:
    return ModelFolderError(f"the model in {file.folder} has no layers for multi-token prediction: {why}")
