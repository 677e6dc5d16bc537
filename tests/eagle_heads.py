"""EAGLE checkpoints (EAGLE-1 and 2) with random weights, and what such a head proposes, computed independently."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.head_tensors import Numbers, saved
from tests.heads import Eagle3Reference, eagle3_tensors, layer_config


def save_eagle(
    folder: Path,
    target: Any,
    *,
    form: str = "raw",
    bias: bool = False,
    norms: bool = False,
    embedding: str = "none",
    seed: int = 6,
) -> Path:
    """Write a checkpoint.

    Args:
        folder: where; a raw checkpoint says by the folder's name alone what it is.
        target: a model of transformers.
        form: ``raw`` as SafeAILab publishes it, wrapped as ``vllm``'s `EAGLEConfig`, or ``speculators``.
        bias: of the first layer.
        norms: those of the speculators format's `layernorms`.
        embedding: ``none``, ``copied`` from the target, or its ``own``.
        seed: of the weights.
    """
    size, numbers = target.config.hidden_size, Numbers(seed)
    tensors = _layer_tensors(target, seed)
    tensors["fc.weight"] = numbers.plain(size, 2 * size) / size**0.5
    if bias:
        tensors["fc.bias"] = numbers.plain(size)
    targets = target.get_input_embeddings().weight.detach()
    if embedding != "none":
        own = numbers.plain(*targets.shape)
        tensors["embed_tokens.weight"] = targets.clone() if embedding == "copied" else own
    if norms:
        for name in NORMS:
            tensors[name] = numbers.norm(size)
    if form == "speculators":
        tensors = {_speculators_name(name): each for name, each in tensors.items()}
    return saved(folder, _config(target, form, bias=bias, norms=norms), tensors)


def _layer_tensors(target: Any, seed: int) -> dict[str, Tensor]:
    """EAGLE-3's layer, with queries, keys and values of one state."""
    size = target.config.hidden_size
    eagle3 = eagle3_tensors(target, 4, seed)
    tensors = {
        name.replace("midlayer.", "layers.0."): each
        for name, each in eagle3.items()
        if name.startswith(("midlayer.self_attn.o", "midlayer.mlp", "midlayer.post"))
    }
    for name in ("q", "k", "v"):
        whole = eagle3[f"midlayer.self_attn.{name}_proj.weight"]
        tensors[f"layers.0.self_attn.{name}_proj.weight"] = whole[:, :size] * 2**0.5
    return tensors


NORMS = ("embedding_layernorm.weight", "layers.0.input_layernorm.weight", "pre_lm_head_layernorm.weight")
_SPECULATORS_NAMES = {"fc.": "fusion_fc.", "layers.0.": "transformer."}


def _speculators_name(name: str) -> str:
    for prefix, other in _SPECULATORS_NAMES.items():
        if name.startswith(prefix):
            return other + name.removeprefix(prefix)
    return name


def _config(target: Any, form: str, *, bias: bool, norms: bool) -> dict[str, Any]:
    layer = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **layer_config(target)}
    if form == "speculators":
        return {
            "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
            "speculators_model_type": "eagle",
            "speculators_config": {"algorithm": "eagle"},
            "transformer_layer_architecture": "LlamaDecoderLayer",
            "transformer_layer_config": layer,
            "fusion_bias": bias,
            "layernorms": norms,
        }
    if form == "vllm":
        return {"architectures": ["EAGLEModel"], "model_type": "eagle", "model": layer, "bias": bias}
    return {**layer, "bias": bias}


class EagleReference(Eagle3Reference):
    """Greedy proposals of a checkpoint, in float32: one sequence, no cache. Of EAGLE-3's reference it has the attention
    of a layer."""

    def __init__(self, folder: Path, target: Any) -> None:
        config = json.loads((folder / "config.json").read_text())
        layer = config.get("transformer_layer_config", config.get("model", config))
        self._dim = layer["head_dim"]
        stored = load_file(folder / "model.safetensors")
        self._w = {
            name.replace("layers.0.", "midlayer.")
            .replace("transformer.", "midlayer.")
            .replace("fusion_fc.", "fc."): each.float()
            for name, each in stored.items()
        }
        self._theta = target.config.rope_parameters["rope_theta"]
        self._target = target
        self._embedding = self._w.get("embed_tokens.weight", target.get_input_embeddings().weight)

    @torch.no_grad()
    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The most probable `count` tokens after these."""
        states = list(self._target.model(input_ids=torch.tensor([token_ids])).last_hidden_state[0, :-1])
        tokens = list(token_ids[1:])
        for _ in range(count):
            states.append(self._state(tokens, torch.stack(states)))
            foreseen = self._normed(states[-1], "pre_lm_head_layernorm")
            tokens.append(int(self._target.lm_head(foreseen).argmax()))
        return tokens[len(token_ids) - 1 :]

    def _state(self, tokens: list[int], states: Tensor) -> Tensor:
        """The state that is foreseen behind the last pair."""
        embedded = self._normed(self._embedding[torch.tensor(tokens)], "embedding_layernorm")
        inputs = self._by("fc", torch.cat((embedded, states), dim=-1))
        state = inputs + self._attended(self._normed(inputs, "midlayer.input_layernorm"))
        inner = self._norm(state, "midlayer.post_attention_layernorm")
        return (state + self._swiglu("midlayer.mlp", inner))[-1]

    def _normed(self, states: Tensor, name: str) -> Tensor:
        """By a norm that only some checkpoints have."""
        return self._norm(states, name) if f"{name}.weight" in self._w else states
