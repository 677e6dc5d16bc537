"""Trains Medusa heads for the demo target: each foresees one of the tokens that the target writes next.

The heads learn the target's own distributions (Medusa-1 of Cai et al. 2024, arXiv 2401.10774, with distillation in
place of the corpus' next token); the target stays as it is. Run as `python -m models.demo.recipe.heads.medusa --help`.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from models.demo.recipe.architecture import Texts, write_json
from models.demo.recipe.heads import HEAD_ROWS, Compared, make_head, save_weights
from models.demo.recipe.measure import DEMO_FOLDER, PROPOSED, options_of
from models.demo.recipe.training import Loss
from tandem.engine.models import loading
from tandem.engine.models.heads.medusa import MedusaHeads

SEED = 13
"""The seed of the checked-in heads."""


def head_logits(heads: MedusaHeads, hidden: Tensor) -> Tensor:
    """From the target's final states [rows, length, width] to logits [rows, length - K, K, vocabulary]: those of head k
    at base i are of the token at i + k + 2."""
    bases = hidden[:, :-PROPOSED]
    return heads.logits(bases.flatten(0, 1)).view(*bases.shape[:2], PROPOSED, -1)


def target_logits(target: LlamaForCausalLM, hidden: Tensor) -> Tensor:
    """The target's logits for the same tokens, of the same shape."""
    own: Tensor = target.lm_head(hidden)
    return own[:, 1:].unfold(1, PROPOSED, 1).transpose(2, 3)


def losses(heads: MedusaHeads, target: LlamaForCausalLM, batch: Texts, compare: Loss) -> Iterator[Tensor]:
    """Of each head."""
    hidden = batch.hidden.float()
    own = head_logits(heads, hidden)
    with torch.no_grad():
        wanted = target_logits(target, hidden)
    yield from (compare(wanted[:, :, k], own[:, :, k]) for k in range(PROPOSED))


def new_heads(target_folder: Path, folder: Path) -> MedusaHeads:
    """Heads whose blocks do nothing yet. Their config is written to the folder."""
    target = json.loads((target_folder / "config.json").read_text(encoding="utf-8"))
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": PROPOSED,
        "num_hidden_layers": 1,
        "hidden_size": target["hidden_size"],
        "vocab_size": target["vocab_size"],
    }
    write_json(config, folder / "config.json")
    loaded = loading.load_model(target_folder, dtype="float32")
    torch.manual_seed(SEED)
    heads = MedusaHeads(folder)
    heads.build(loaded)
    with torch.no_grad():
        for parameter in heads.blocks.parameters():
            parameter.zero_()
    return heads


@torch.no_grad()
def with_linear_maps(heads: MedusaHeads, target: LlamaForCausalLM, lessons: list[Texts]) -> list[Texts]:
    """Start each head as the target's output layer behind the linear map that best foresees the later state.

    Ridge regression over all lessons, which are returned: it costs less than a step and saves most of the first phase.
    """
    width = heads.state_size
    inner = torch.zeros(width, width, dtype=torch.float64)
    outer = torch.zeros(PROPOSED, width, width, dtype=torch.float64)
    for group in lessons:
        for hidden in torch.split(group.hidden, HEAD_ROWS):
            known = hidden[:, :-PROPOSED].flatten(0, 1).float()
            inner += known.T @ known
            for k in range(PROPOSED):
                later = hidden[:, 1 + k : hidden.shape[1] - PROPOSED + 1 + k].flatten(0, 1).float()
                outer[k] += known.T @ later
    # Relative to the mean square of the states
    ridge = torch.eye(width, dtype=torch.float64) * inner.trace() / width * 1e-3
    for output, each in zip(heads.lm_heads.parameters(), outer, strict=True):
        output.copy_(target.lm_head.weight @ torch.linalg.solve(inner + ridge, each).float().T)
    return lessons


def compared(heads: MedusaHeads, target: LlamaForCausalLM, written: Texts) -> Iterator[Compared]:
    """Proposals at each place of some texts."""
    parts = (torch.split(each, HEAD_ROWS) for each in (written.hidden, written.tokens))
    for hidden, tokens in zip(*parts, strict=True):
        chosen = tokens[:, 2:-1].unfold(1, PROPOSED, 1)
        own = head_logits(heads, hidden)
        wanted = target_logits(target, hidden)
        yield own[:, : chosen.shape[1]], wanted[:, : chosen.shape[1]], chosen


def main() -> None:
    """Train Medusa heads for the demo target, and measure them on the held-out prompts."""
    minutes = {"minutes_reading": 1.0, "minutes_writing": 5.0, "minutes_heads": 14.0}
    options = options_of(main.__doc__, DEMO_FOLDER / "medusa", **minutes)
    make_head(new_heads, with_linear_maps, losses, compared, save_weights, options, SEED)


if __name__ == "__main__":
    main()
