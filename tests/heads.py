"""EAGLE-3 checkpoints with random weights, and what such a head proposes, computed independently of the engine.

The reference is written from the published layout: one sequence, no cache, every pair computed anew for each token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

HEADS, KV_HEADS, HEAD_DIM, MLP = 2, 1, 16, 48
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def eagle3_tensors(target: Any, draft_vocabulary: int, seed: int, **flags: bool) -> dict[str, Tensor]:
    """Random tensors by their published names, for a model of transformers."""
    size = target.config.hidden_size
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        numbers: Tensor = torch.randn(rows, columns, generator=generator) / columns**0.5
        return numbers

    def norm(width: int) -> Tensor:
        return 1 + 0.2 * torch.randn(width, generator=generator)

    layer = {
        "input_layernorm.weight": norm(size),
        "hidden_norm.weight": norm(size),
        "post_attention_layernorm.weight": norm(size),
        "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, 2 * size),
        "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * size),
        "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * size),
        "self_attn.o_proj.weight": matrix(size, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": matrix(MLP, size),
        "mlp.up_proj.weight": matrix(MLP, size),
        "mlp.down_proj.weight": matrix(size, MLP),
    }
    tensors = {f"midlayer.{name}": tensor for name, tensor in layer.items()}
    tensors |= {"fc.weight": matrix(size, 3 * size), "norm.weight": norm(size)}
    tensors["lm_head.weight"] = matrix(draft_vocabulary, size)
    chosen = torch.randperm(target.config.vocab_size, generator=generator)[:draft_vocabulary].sort().values
    tensors["d2t"] = chosen - torch.arange(draft_vocabulary)
    tensors["t2d"] = torch.zeros(target.config.vocab_size, dtype=torch.bool).index_fill_(0, chosen, True)
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(3 * size)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{index}.weight": norm(size) for index in range(3)}
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
    folder.mkdir(parents=True, exist_ok=True)
    tensors = eagle3_tensors(target, draft_vocabulary, seed, **flags)
    if own_embedding:
        generator = torch.Generator().manual_seed(seed + 1)
        shape = (target.config.vocab_size, target.config.hidden_size)
        tensors["embed_tokens.weight"] = torch.randn(shape, generator=generator)
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
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    return folder


class Eagle3Reference:
    """Greedy proposals of a checkpoint, in float32."""

    def __init__(self, folder: Path, target: Any) -> None:
        config = json.loads((folder / "config.json").read_text())
        wrapped = "speculators_model_type" in config
        self._flags = {flag: config.get(flag, flag == "norm_before_residual" and wrapped) for flag in FLAGS}
        count = target.config.num_hidden_layers
        default = [2, count // 2, count - 3]
        self._layer_ids = config.get("eagle_aux_hidden_state_layer_ids", default)
        layer = config["transformer_layer_config"] if wrapped else config
        self._epsilon = layer["rms_norm_eps"]
        self._heads, self._kv_heads = layer["num_attention_heads"], layer["num_key_value_heads"]
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
        gate, up, down = (self._w[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        state = (state + (functional.silu(inner @ gate.T) * (inner @ up.T)) @ down.T)[-1]
        output = self._norm(state, "norm")
        return (output if self._flags["norm_output"] else state), self._w["lm_head.weight"] @ output

    def _attended(self, joined: Tensor) -> Tensor:
        length = len(joined)
        query, key, value = (
            (joined @ self._w[f"midlayer.self_attn.{name}_proj.weight"].T).view(length, -1, self._dim)
            for name in ("q", "k", "v")
        )
        query, key = self._rotated(query), self._rotated(key)
        hidden = torch.ones(length, length).triu(1).bool()
        parts = []
        for head in range(self._heads):
            shared = head * self._kv_heads // self._heads
            scores = query[:, head] @ key[:, shared].T / self._dim**0.5
            parts.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value[:, shared])
        return torch.cat(parts, dim=-1) @ self._w["midlayer.self_attn.o_proj.weight"].T

    def _rotated(self, states: Tensor) -> Tensor:
        half = self._dim // 2
        angles = torch.arange(len(states))[:, None] / self._theta ** (torch.arange(half) / half)
        cosines, sines = angles.cos()[:, None], angles.sin()[:, None]
        first, second = states[..., :half], states[..., half:]
        return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)

    def _norm(self, states: Tensor, name: str) -> Tensor:
        return functional.rms_norm(states, states.shape[-1:], self._w[f"{name}.weight"], self._epsilon)
