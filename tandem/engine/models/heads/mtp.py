"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): a layer in the target's own checkpoint drafts.

The layer reads the token's embedding and the target's state after the last norm, each normalized, and shares the
target's embedding and output head. It is transformers' own module (`transformers.modeling_layers.MtpLayer`). A proposal
of several tokens uses the first MTP layer again and again, as vLLM does where a checkpoint has one; each time it reads
the normalized state that it gave before, as in transformers and SGLang.

Qwen3-Next's layer computes the same around one of its blocks with full attention, and is stored under other names (as
vLLM's `Qwen3NextMultiTokenPredictor` reads them). A checkpoint of Qwen3 with such tensors has a block of Qwen3.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import MtpLayer, MtpModel

from tandem.engine.models.attention import STEP_ARGUMENT
from tandem.engine.models.heads.configs.mtp import MtpConfig
from tandem.engine.models.heads.interface import FINAL_STATE, DraftHead
from tandem.engine.models.heads.placement import placed
from tandem.engine.models.heads.sharing import shared_embedding, shared_output_head
from tandem.engine.models.heads.target import text_config
from tandem.engine.models.heads.tensors import HeadTensors
from tandem.engine.models.loading import LoadedModel

_EXPERTS = "mlp.experts."
_APPENDED_NAMES = {"mtp_block.": "", "post_norm.": "shared_head.norm."}
_SEPARATE_NAMES = {
    "enorm.": "pre_fc_norm_embedding.", "hnorm.": "pre_fc_norm_hidden.", "eh_proj.": "fc.", "mtp_block.": "layers.0.",
    "post_norm.": "norm.",
}  # fmt: skip
"""Beginnings of names in transformers' module, and those in a checkpoint behind its prefix."""


class MtpHead(DraftHead):
    """A target's first MTP layer."""

    layer_ids = (FINAL_STATE,)
    has_reduced_vocabulary = False

    def __init__(self, config: MtpConfig, target: LoadedModel) -> None:
        """The layer, without its weights."""
        super().__init__()
        module: Any = target.module
        self.state_size = text_config(target).hidden_size
        self.vocabulary_size = target.info.vocabulary_size
        self.layers = (replace(target.layers[-1], window=None),)
        with torch.device("meta"):
            self.layer: nn.Module = (
                _separate_layer(target) if config.is_separate else MtpModel(module, 1).layers[0]
            )
        self.embed_tokens = shared_embedding(target)
        self.lm_head = shared_output_head(target)
        self.rotary_emb: nn.Module = module.get_decoder().rotary_emb

    @property
    def readers(self) -> Sequence[nn.Module]:
        """See `DraftHead`."""
        return ()

    def combined(self, hidden_states: Sequence[Tensor]) -> Tensor:
        """See `DraftHead`."""
        return hidden_states[0]

    def advanced(
        self, token_ids: Tensor, positions: Tensor, states: Tensor, step: Any
    ) -> tuple[Tensor, Tensor]:
        """See `DraftHead`."""
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

    def own_logits(self, hidden: Tensor) -> Tensor:
        """See `DraftHead`."""
        scores: Tensor = self.lm_head(hidden)
        return scores


def _separate_layer(target: LoadedModel) -> nn.Module:
    """Around a block like the target's last one, with full attention and numbered 0, as in vLLM."""
    module: Any = target.module
    last = module.get_decoder().layers[-1]
    config = copy.deepcopy(text_config(target))
    config.layer_types = ["full_attention"]
    return MtpLayer(config, type(last), type(last.input_layernorm), 0)


def load_mtp(config: MtpConfig, target: LoadedModel) -> MtpHead:
    """The head, in the target's dtype and on its device.

    Raises:
        ModelFolderError: a tensor is missing or has another shape than the config says.
    """
    head = MtpHead(config, target)
    tensors = HeadTensors(config.folder, {})
    kept_as_stored = {name for name, _ in head.layer.named_buffers()}
    found: dict[str, Tensor] = {}
    for name, wanted in head.layer.state_dict().items():
        # The router's bias decides between close scores; transformers keeps it in float32 as well.
        dtype = wanted.dtype if name in kept_as_stored else target.dtype
        found[name] = _tensor(tensors, config, name, tuple(wanted.shape)).to(target.device, dtype)
    head.layer.load_state_dict(found, assign=True)
    return placed(head, target)


def _tensor(tensors: HeadTensors, config: MtpConfig, name: str, shape: tuple[int, ...]) -> Tensor:
    """One of the module's tensors. transformers keeps the experts of a layer in one, checkpoints each by itself."""
    published = _published(name, config)
    layer, is_of_experts, part = published.partition(_EXPERTS)
    if not is_of_experts or published in tensors:
        return tensors.read(published, shape, "by config.json")
    experts, rows, columns = shape
    parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
    wanted = (rows // len(parts), columns)
    return torch.stack(
        [
            torch.cat(
                [
                    tensors.read(f"{layer}{_EXPERTS}{expert}.{each}.weight", wanted, "by config.json")
                    for each in parts
                ]
            )
            for expert in range(experts)
        ]
    )


def _published(name: str, config: MtpConfig) -> str:
    names = _SEPARATE_NAMES if config.is_separate else _APPENDED_NAMES
    beginning = next((each for each in names if name.startswith(each)), "")
    return config.prefix + names.get(beginning, "") + name.removeprefix(beginning)
