"""DFlash drafts with random weights, and what such a draft proposes, computed independently of the engine.

The reference is written from z-lab's published layout and that of speculators' `DFlashDraftModel`: one sequence, no
cache.
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
from tests.heads import HEAD_DIM, layer_config

HEADS, KV_HEADS, MLP, LAYERS, THETA = 4, 2, 40, 2, 5000.0


def save_dflash(
    folder: Path, target: Any, *, block_size: int = 5, layer_ids: Sequence[int] = (1, 4), seed: int = 5,
    wrapped: bool = False, draft_vocabulary: int | None = None,
) -> Path:  # fmt: skip
    """Write a draft for a model of transformers; its mask is the vocabulary's last token.

    Args:
        folder: where.
        target: the model.
        block_size: tokens of a block, the last one of the text among them.
        layer_ids: layers of the target whose outputs the draft reads, counted from 0.
        seed: of the weights.
        wrapped: in the speculators format.
        draft_vocabulary: tokens that the draft can say, with `d2t` and an output layer of its own; only there.
    """
    size, vocabulary, numbers = target.config.hidden_size, target.config.vocab_size, Numbers(seed)
    tensors = _tensors(size, len(layer_ids), numbers)
    if draft_vocabulary is not None:
        chosen = numbers.chosen(vocabulary, draft_vocabulary).sort().values
        tensors["d2t"] = chosen - torch.arange(draft_vocabulary)
        tensors["lm_head.weight"] = numbers.matrix(draft_vocabulary, size)
    layers = _layers_config(target)
    config: dict[str, Any] = {"architectures": ["DFlashDraftModel"], "block_size": block_size}
    if wrapped:
        config |= {"speculators_model_type": "dflash", "transformer_layer_config": layers}
        config |= {
            "aux_hidden_state_layer_ids": [each + 1 for each in layer_ids],
            "mask_token_id": vocabulary - 1,
        }
        config |= {"draft_vocab_size": draft_vocabulary or vocabulary, "target_hidden_size": None}
        config |= {"sample_from_anchor": False, "projector_type": "dflash"}
    else:
        own = {"mask_token_id": vocabulary - 1, "target_layer_ids": list(layer_ids)}
        config |= {**layers, "dflash_config": own}
    return saved(folder, config, tensors)


def _tensors(size: int, states: int, numbers: Numbers) -> dict[str, Tensor]:
    """Random tensors of a draft that reads so many states, by their published names."""
    tensors = {"fc.weight": numbers.matrix(size, states * size)}
    tensors |= {"hidden_norm.weight": numbers.norm(size), "norm.weight": numbers.norm(size)}
    for index in range(LAYERS):
        layer = {
            "input_layernorm.weight": numbers.norm(size),
            "post_attention_layernorm.weight": numbers.norm(size),
            **numbers.attention(size, size, HEADS, KV_HEADS, HEAD_DIM),
            "self_attn.q_norm.weight": numbers.norm(HEAD_DIM),
            "self_attn.k_norm.weight": numbers.norm(HEAD_DIM),
            **numbers.mlp(size, MLP),
        }
        tensors |= {f"layers.{index}.{name}": each for name, each in layer.items()}
    return tensors


def _layers_config(target: Any) -> dict[str, Any]:
    """The draft's layers as a Qwen3 config."""
    return layer_config(target) | {
        "model_type": "qwen3",
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rope_theta": THETA,
        "attention_bias": False,
        "layer_types": ["full_attention"] * LAYERS,
        "max_position_embeddings": target.config.max_position_embeddings,
        "num_target_layers": target.config.num_hidden_layers,
    }


class DFlashReference(Layers):
    """Greedy proposals of a draft, in float32."""

    def __init__(self, folder: Path, target: Any) -> None:
        self._config = json.loads((folder / "config.json").read_text())
        self._w = load_file(folder / "model.safetensors")
        self._target = target

    @torch.no_grad()
    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The most probable `count` tokens after these."""
        own = self._config.get("dflash_config", self._config)
        # z-lab counts layers from 0 and means their outputs; speculators counts the layers before a state.
        numbers = own.get("aux_hidden_state_layer_ids") or [each + 1 for each in own["target_layer_ids"]]
        output = self._target(input_ids=torch.tensor([token_ids[:-1]]), output_hidden_states=True)
        read = [output.hidden_states[number][0] for number in numbers]
        context = self._norm(torch.cat(read, dim=-1) @ self._w["fc.weight"].T, "hidden_norm")
        ids = torch.tensor([token_ids[-1], *(own["mask_token_id"] for _ in range(count))])
        hidden = self._target.get_input_embeddings().weight[ids]
        for index in range(LAYERS):
            hidden = self._layer(f"layers.{index}", hidden, context)
        normed = self._norm(hidden[1:], "norm")
        if "d2t" not in self._w:
            return [int(each) for each in (normed @ self._target.get_output_embeddings().weight.T).argmax(-1)]
        best = (normed @ self._w["lm_head.weight"].T).argmax(-1)
        return [int(each) for each in best + self._w["d2t"][best]]

    def _layer(self, name: str, hidden: Tensor, context: Tensor) -> Tensor:
        inner = self._norm(hidden, f"{name}.input_layernorm")
        seen = torch.cat((context, inner))
        query, key, value = (
            self._by(f"{name}.self_attn.{part}_proj", each).view(len(each), -1, HEAD_DIM)
            for part, each in (("q", inner), ("k", seen), ("v", seen))
        )
        query = turned_halves(self._norm(query, f"{name}.self_attn.q_norm"), THETA, len(context))
        key = turned_halves(self._norm(key, f"{name}.self_attn.k_norm"), THETA)
        # Every token sees all
        hidden = hidden + self._by(f"{name}.self_attn.o_proj", attended(query, key, value, is_causal=False))
        return hidden + self._swiglu(f"{name}.mlp", self._norm(hidden, f"{name}.post_attention_layernorm"))
