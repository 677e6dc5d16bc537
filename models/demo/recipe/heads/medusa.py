"""Trains Medusa heads for the demo target: each foresees one of the tokens that the target writes next.

The heads learn the target's own distributions (Medusa-1 of Cai et al. 2024, arXiv 2401.10774, with distillation in
place of the corpus' next token); the target stays as it is. Run as `python -m models.demo.recipe.heads.medusa --help`.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from models.demo.recipe.architecture import Continuation, load_model, write_json
from models.demo.recipe.measure import Compared, measured_head, parser_of
from models.demo.recipe.training import HEAD_ROWS, Lessons, Loss, lessons_of, train_head
from tandem.engine.models import loading
from tandem.engine.models.heads.medusa import MedusaHeads

HEADS = 4
"""As many as the demo proposes tokens."""
SEED = 13
"""The seed of the checked-in heads."""


def head_logits(heads: MedusaHeads, hidden: Tensor) -> Tensor:
    """From the target's final states [rows, length, width] to logits [rows, length - HEADS, HEADS, vocabulary]: those
    of head k at base i are of the token at i + k + 2."""
    bases = hidden[:, :-HEADS]
    return heads.logits(bases.flatten(0, 1)).view(*bases.shape[:2], HEADS, -1)


def target_logits(target: LlamaForCausalLM, hidden: Tensor) -> Tensor:
    """The target's logits for the same tokens, of the same shape."""
    own: Tensor = target.lm_head(hidden)
    return own[:, 1:].unfold(1, HEADS, 1).transpose(2, 3)


def losses(heads: MedusaHeads, target: LlamaForCausalLM, batch: Lessons, compare: Loss) -> Iterator[Tensor]:
    """Of each head."""
    hidden = batch.hidden.float()
    own = head_logits(heads, hidden)
    with torch.no_grad():
        wanted = target_logits(target, hidden)
    yield from (compare(wanted[:, :, k], own[:, :, k]) for k in range(HEADS))


def new_heads(target_folder: Path, folder: Path) -> MedusaHeads:
    """Heads whose blocks do nothing yet. Their config is written to the folder."""
    target = json.loads((target_folder / "config.json").read_text(encoding="utf-8"))
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": HEADS,
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
def adopt_linear_maps(heads: MedusaHeads, target: LlamaForCausalLM, lessons: Sequence[Lessons]) -> None:
    """Start each head as the target's output layer behind the linear map that best foresees the later state.

    Ridge regression over all lessons: it costs less than one step of training and saves most of the first phase.
    """
    width = heads.state_size
    inner = torch.zeros(width, width, dtype=torch.float64)
    outer = torch.zeros(HEADS, width, width, dtype=torch.float64)
    for group in lessons:
        for hidden in torch.split(group.hidden, HEAD_ROWS):
            known = hidden[:, :-HEADS].flatten(0, 1).float()
            inner += known.T @ known
            for k in range(HEADS):
                later = hidden[:, 1 + k : hidden.shape[1] - HEADS + 1 + k].flatten(0, 1).float()
                outer[k] += known.T @ later
    # Relative to the mean square of the states
    ridge = torch.eye(width, dtype=torch.float64) * inner.trace() / width * 1e-3
    for output, each in zip(heads.lm_heads.parameters(), outer, strict=True):
        output.copy_(target.lm_head.weight @ torch.linalg.solve(inner + ridge, each).float().T)


def compared(heads: MedusaHeads, target: LlamaForCausalLM, written: Continuation) -> Iterator[Compared]:
    """Proposals at each place of some texts."""
    parts = (torch.split(each, HEAD_ROWS) for each in (written.hidden, written.tokens))
    for hidden, tokens in zip(*parts, strict=True):
        chosen = tokens[:, 2:-1].unfold(1, HEADS, 1)
        own, wanted = head_logits(heads, hidden), target_logits(target, hidden)
        yield own[:, : chosen.shape[1]], wanted[:, : chosen.shape[1]], chosen


def main() -> None:
    """Train Medusa heads for the demo target, and measure them on the held-out prompts."""
    parser = parser_of(main.__doc__, "medusa")
    parser.add_argument("--minutes-writing", type=float, default=5.0)
    parser.add_argument("--minutes-heads", type=float, default=14.0)
    options = parser.parse_args()
    target = load_model(options.target)
    heads = new_heads(options.target, options.output)
    minutes = options.minutes_reading, options.minutes_writing
    lessons = lessons_of(target, options.target, *minutes, SEED)
    adopt_linear_maps(heads, target, lessons)
    seen = train_head(heads, partial(losses, heads, target), lessons, options.minutes_heads, SEED)
    # By the names of vLLM's `MedusaModel`.
    tensors = {name: each.detach().bfloat16().contiguous() for name, each in heads.named_parameters()}
    save_file(tensors, options.output / "model.safetensors")
    found = measured_head(target, options.target, HEADS, SEED, partial(compared, heads, target))
    figures = {"head_tokens_seen": seen, **found}
    write_json(figures, options.output / "figures.json")


if __name__ == "__main__":
    main()
