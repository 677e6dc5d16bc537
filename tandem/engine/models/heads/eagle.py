"""EAGLE (Li et al. 2024, arXiv 2401.15077) and EAGLE-2: one Llama layer that foresees the target's next state.

It reads the token's embedding and the target's final state, and the target's own output layer makes tokens of its
result. The layer's first norm is the identity and there is no norm behind it, except in heads of the speculators format
with `layernorms`. Tensor names are those of SafeAILab's checkpoints or of speculators' `EagleSpeculator`. EAGLE-2 has
the same heads and drafts trees; proposals here are chains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tandem.engine.kv_cache.layer_groups import LayerGeometry
from tandem.engine.models.heads.configs.eagle import EagleConfig
from tandem.engine.models.heads.interface import FINAL_STATE, DraftHead
from tandem.engine.models.heads.parts import Attention, Mlp, Norm, rotary_of
from tandem.engine.models.heads.placement import placed
from tandem.engine.models.heads.target import check_same, text_config
from tandem.engine.models.heads.tensors import HeadTensors
from tandem.engine.models.loading import LoadedModel

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
