"""Medusa checkpoints with random weights, and what their heads propose, computed independently."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from tests.head_tensors import Layers, Numbers, saved

HEADS = 4


def save_medusa(
    folder: Path, target: Any, *, published: bool = False, layers: int = 1, bias: bool = False,
    draft_vocabulary: int | None = None, whole_outputs: bool = False, shared_output: bool = False, seed: int = 7,
) -> Path:  # fmt: skip
    """Write a checkpoint by FasterDecoding's names (`published`) or by those of vLLM's `MedusaModel`.

    Args:
        folder: where.
        target: a model of transformers.
        published: `{head}.{layer}.linear`, and no widths in the config.
        layers: residual blocks of each head.
        bias: these have biases.
        draft_vocabulary: tokens that the heads can say, with a `token_map`; None for all.
        whole_outputs: the output layers have all rows nevertheless.
        shared_output: all heads have one output layer.
        seed: of the weights.
    """
    size, vocabulary, numbers = target.config.hidden_size, target.config.vocab_size, Numbers(seed)
    rows = draft_vocabulary if draft_vocabulary is not None and not whole_outputs else vocabulary
    tensors: dict[str, Tensor] = {}
    for head in range(HEADS):
        for layer in range(layers):
            name = f"{head}.{layer}.linear" if published else f"medusa_heads.blocks.{head}.layers.{layer}"
            tensors[f"{name}.weight"] = numbers.matrix(size, size)
            if bias:
                tensors[f"{name}.bias"] = numbers.plain(size)
        name = f"{head}.{layers}" if published else f"lm_heads.{head}"
        if head == 0 or not shared_output:
            tensors[f"{name}.weight"] = numbers.matrix(rows, size)
    config: dict[str, Any] = {"medusa_num_heads": HEADS, "medusa_num_layers": layers}
    if not published:
        config = {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": size}
        config |= {"num_heads": HEADS, "num_hidden_layers": layers, "vocab_size": vocabulary}
        config |= {"medusa_fc_bias": bias, "original_lm_head": shared_output}
    if draft_vocabulary is not None:
        tensors["token_map"] = numbers.chosen(vocabulary, draft_vocabulary)
        config["truncated_vocab_size"] = draft_vocabulary
    return saved(folder, config, tensors)


class MedusaReference(Layers):
    """Greedy proposals of a checkpoint, in float32: one sequence, no cache."""

    def __init__(self, folder: Path, target: Any) -> None:
        self._config = json.loads((folder / "config.json").read_text())
        self._layers = self._config.get("medusa_num_layers", self._config.get("num_hidden_layers"))
        stored = load_file(folder / "model.safetensors")
        self._w = {
            name.removeprefix("medusa_heads."): each if name == "token_map" else each.float()
            for name, each in stored.items()
        }
        self._target = target

    @torch.no_grad()
    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The most probable `count` tokens after these, one by each head."""
        # The state that made the target's last token; the token itself is not read.
        state = self._target.model(input_ids=torch.tensor([token_ids])).last_hidden_state[0, -2]
        return [self._said(head, state) for head in range(count)]

    def _said(self, head: int, state: Tensor) -> int:
        for layer in range(self._layers):
            published = f"{head}.{layer}.linear"
            name = published if f"{published}.weight" in self._w else f"blocks.{head}.layers.{layer}"
            state = state + functional.silu(self._by(name, state))
        names = (f"{head}.{self._layers}.weight", f"lm_heads.{head}.weight", "lm_heads.0.weight")
        output = self._w[next(name for name in names if name in self._w)]
        known = self._w.get("token_map")
        if known is None:
            return int((output @ state).argmax())
        rows = output if len(output) == len(known) else output[known]
        return int(known[(rows @ state).argmax()])
