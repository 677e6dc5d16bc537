"""EAGLE-3 checkpoints with random weights, and what such a head proposes, computed independently of the engine.

The reference is written from the published layout: one sequence, no cache, every pair computed anew for each token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.head_tensors import Layers, Numbers, attended, saved, turned_halves

HEADS, KV_HEADS, HEAD_DIM, MLP = 2, 1, 16, 48
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def eagle3_tensors(target: Any, draft_vocabulary: int, seed: int, **flags: bool) -> dict[str, Tensor]:
    """Random tensors by their published names, for a model of transformers."""
    size, numbers = target.config.hidden_size, Numbers(seed)
    layer = {
        "input_layernorm.weight": numbers.norm(size),
        "hidden_norm.weight": numbers.norm(size),
        "post_attention_layernorm.weight": numbers.norm(size),
        **numbers.attention(size, 2 * size, HEADS, KV_HEADS, HEAD_DIM),
        **numbers.mlp(size, MLP),
    }
    tensors = {f"midlayer.{name}": tensor for name, tensor in layer.items()}
    tensors |= {"fc.weight": numbers.matrix(size, 3 * size), "norm.weight": numbers.norm(size)}
    tensors["lm_head.weight"] = numbers.matrix(draft_vocabulary, size)
    chosen = numbers.chosen(target.config.vocab_size, draft_vocabulary).sort().values
    tensors["d2t"] = chosen - torch.arange(draft_vocabulary)
    tensors["t2d"] = torch.zeros(target.config.vocab_size, dtype=torch.bool).index_fill_(0, chosen, True)
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = numbers.norm(3 * size)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{index}.weight": numbers.norm(size) for index in range(3)}
    return tensors


def layer_config(target: Any) -> dict[str, Any]:
    """The head's one layer as a Llama config. Its rotary base is wrong, as in published checkpoints."""
    return {
        "hidden_size": target.config.hidden_size,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 777.0,
        "vocab_size": target.config.vocab_size,
    }


def save_eagle3(
    folder: Path, target: Any, *, wrapped: bool = False, own_embedding: bool = False, draft_vocabulary: int = 96,
    seed: int = 5, layer_ids: Sequence[int] | None = None, **flags: bool,
) -> Path:  # fmt: skip
    """Write a checkpoint in the raw format, or wrapped as speculators does."""
    tensors = eagle3_tensors(target, draft_vocabulary, seed, **flags)
    if own_embedding:
        shape = (target.config.vocab_size, target.config.hidden_size)
        tensors["embed_tokens.weight"] = Numbers(seed + 1).plain(*shape)
    if wrapped:
        tensors = {name.replace("midlayer.", "layers.0."): each for name, each in tensors.items()}
    config: dict[str, Any] = {"draft_vocab_size": draft_vocabulary, **flags}
    if layer_ids is not None:
        config["eagle_aux_hidden_state_layer_ids"] = list(layer_ids)
    if wrapped:
        config |= {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
        config["transformer_layer_config"] = layer_config(target)
    else:
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **layer_config(target)}
    return saved(folder, config, tensors)


class Eagle3Reference(Layers):
    """Greedy proposals of a checkpoint, in float32."""

    def __init__(self, folder: Path, target: Any) -> None:
        config = json.loads((folder / "config.json").read_text())
        wrapped = "speculators_model_type" in config
        self._flags = {flag: config.get(flag, flag == "norm_before_residual" and wrapped) for flag in FLAGS}
        count = target.config.num_hidden_layers
        default = [2, count // 2, count - 3]
        self._layer_ids = config.get("eagle_aux_hidden_state_layer_ids", default)
        layer = config["transformer_layer_config"] if wrapped else config
        self._dim = layer["head_dim"]
        self._w = {
            name.replace("layers.0.", "midlayer."): tensor.float()
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        self._theta = target.config.rope_parameters["rope_theta"]
        self._target = target
        self._embedding = self._w.get("embed_tokens.weight", target.get_input_embeddings().weight)

    @torch.no_grad()
    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The most probable `count` tokens after these."""
        output = self._target(input_ids=torch.tensor([token_ids]), output_hidden_states=True)
        read = [output.hidden_states[index][0] for index in self._layer_ids]
        states = list(self._combined(read)[:-1])
        tokens = list(token_ids[1:])
        for _ in range(count):
            fed_back, logits = self._last(tokens, torch.stack(states))
            best = int(logits.argmax())
            tokens.append(best + int(self._w["d2t"][best]))
            states.append(fed_back)
        return tokens[len(token_ids) - 1 :]

    def _combined(self, read: list[Tensor]) -> Tensor:
        if self._flags["fc_norm"]:
            read = [self._norm(each, f"fc_norm.{index}") for index, each in enumerate(read)]
        joined = torch.cat(read, dim=-1)
        if self._flags["norm_before_fc"]:
            joined = self._norm(joined, "input_norm")
        return joined @ self._w["fc.weight"].T

    def _last(self, tokens: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """State to feed back and logits of the last pair."""
        normed = self._norm(states, "midlayer.hidden_norm")
        embedded = self._norm(self._embedding[torch.tensor(tokens)], "midlayer.input_layernorm")
        attended = self._attended(torch.cat((embedded, normed), dim=-1))
        state = (normed if self._flags["norm_before_residual"] else states) + attended
        inner = self._norm(state, "midlayer.post_attention_layernorm")
        state = (state + self._swiglu("midlayer.mlp", inner))[-1]
        output = self._norm(state, "norm")
        return (output if self._flags["norm_output"] else state), self._w["lm_head.weight"] @ output

    def _attended(self, joined: Tensor) -> Tensor:
        query, key, value = (
            self._by(f"midlayer.self_attn.{name}_proj", joined).view(len(joined), -1, self._dim)
            for name in ("q", "k", "v")
        )
        query, key = turned_halves(query, self._theta), turned_halves(key, self._theta)
        return self._by("midlayer.self_attn.o_proj", attended(query, key, value))
