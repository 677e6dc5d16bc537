"""The demo draft with another tokenizer: other ids, and fewer tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from tests.end_to_end.models import load_reference
from tests.paths import DEMO_DRAFT


def renumbered(folder: Path, size: int, model: Any = None) -> Path:
    """Write a checkpoint whose tokenizer has the first `size` of the demo pair's tokens, with shuffled ids.

    Args:
        folder: Where to write it.
        size: Number of tokens, above 256 for all bytes.
        model: A model with the demo pair's ids, of at least `size` tokens; by default the demo draft.
    """
    order = [*range(size)]
    random.Random(size).shuffle(order)
    weights = load_reference(DEMO_DRAFT) if model is None else model
    old = weights.get_input_embeddings().weight.detach()[order].clone()
    weights.resize_token_embeddings(size)
    with torch.no_grad():
        weights.get_input_embeddings().weight.copy_(old)
    weights.config.eos_token_id = weights.config.pad_token_id = order.index(0)
    weights.generation_config.eos_token_id = order.index(0)
    weights.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(_renumbered(order)), encoding="utf-8")
    return folder


def _renumbered(order: list[int]) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((DEMO_DRAFT / "tokenizer.json").read_text(encoding="utf-8"))
    new_ids = {old: new for new, old in enumerate(order)}
    pieces = state["model"]["vocab"]
    state["model"]["vocab"] = {piece: new_ids[i] for piece, i in pieces.items() if i in new_ids}
    kept = state["model"]["vocab"]
    state["model"]["merges"] = [merge for merge in state["model"]["merges"] if "".join(merge) in kept]
    for token in state["added_tokens"]:
        token["id"] = new_ids[token["id"]]
    return state
