"""Drafting heads for the demo target, `eagle3` and `medusa`: how both are trained and measured."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from models.demo.recipe.architecture import Texts, continue_text, load_model, write_json
from models.demo.recipe.corpus import load_tokenizer
from models.demo.recipe.measure import DEMO_FOLDER, NEW_TOKENS, PROPOSED, are_accepted, rounds_of
from models.demo.recipe.training import Loss, divergence, endless, lessons_of, train_until_over

HEAD_MATRIX_LR = 0.02
HEAD_OTHER_LR = 1e-3
STEP_WEIGHT = 0.8
"""Each token of a proposal counts this much of the one before it, as Medusa's heads do."""
HEAD_ROWS = 4
"""Texts of a batch; some thousand tokens."""
PROMPT_TOKENS = 20
"""Tokens of the prompts behind which heads are measured."""

HeadT = TypeVar("HeadT", bound=nn.Module)
Compared = tuple[Tensor, Tensor, Tensor]
"""Logits [rows, places, K, vocabulary] of a head and of the target, and the tokens of the text [rows, places, K], where
a proposal of K tokens at each place begins with the place's token."""

logger = logging.getLogger(__name__)


def save_weights(head: nn.Module, folder: Path, **more: Tensor) -> None:
    """Write what was trained in bfloat16, and more tensors."""
    trained = ((name, each) for name, each in head.named_parameters() if each.requires_grad)
    tensors = {name: each.detach().bfloat16().contiguous() for name, each in trained}
    save_file(tensors | more, folder / "model.safetensors")


def make_head(
    new: Callable[[Path, Path], HeadT],
    prepared: Callable[[HeadT, LlamaForCausalLM, list[Texts]], list[Texts]],
    losses: Callable[[HeadT, LlamaForCausalLM, Texts, Loss], Iterator[Tensor]],
    compared: Callable[[HeadT, LlamaForCausalLM, Texts], Iterator[Compared]],
    save: Callable[[HeadT, Path], None],
    options: argparse.Namespace,
    seed: int,
) -> None:
    """Train a head for the demo target by the losses of each token of a proposal, and measure it by proposals at each
    place of texts. `new` makes it for the target in the first folder, and writes its config to the second one."""
    folder: Path = DEMO_FOLDER / "target"
    target = load_model(folder)
    head = new(folder, options.output)
    lessons = lessons_of(target, folder, options.minutes_reading, options.minutes_writing, seed)
    batches = endless(prepared(head, target, lessons), HEAD_ROWS, torch.Generator().manual_seed(seed))

    def next_loss(fraction: float) -> tuple[Tensor, int]:
        batch = next(batches)
        found = losses(head, target, batch, divergence(fraction))
        weighed = [STEP_WEIGHT**k * loss for k, loss in enumerate(found)]
        return torch.stack(weighed).sum(), batch.tokens.numel()

    seen = train_until_over(head, next_loss, options.minutes_heads, HEAD_MATRIX_LR, HEAD_OTHER_LR)
    save(head, options.output)
    figures: dict[str, Any] = {"head_tokens_seen": seen}
    held_out = json.loads((DEMO_FOLDER / "heldout_prompts.json").read_text(encoding="utf-8"))
    ids = load_tokenizer(folder)([each["prompt"] for each in held_out])["input_ids"]
    # Those that are long enough, cut to the same length
    prompts = [each[:PROMPT_TOKENS] for each in ids if len(each) >= PROMPT_TOKENS]
    for temperature in (0.0, 0.8):
        written = continue_text(target, prompts, NEW_TOKENS + PROPOSED, temperature, seed)
        accepted = []
        coins = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for own, wanted, chosen in compared(head, target, written):
                flags = are_accepted(own, wanted, chosen, temperature, coins)
                accepted += flags[:, PROMPT_TOKENS - 2 :].tolist()
        rounds = rounds_of(accepted, PROPOSED)
        figures |= {
            f"acceptance_rates_per_position_at_{temperature}": [
                round(each / rounds.count, 4) for each in rounds.by_position
            ],
            f"acceptance_rate_at_{temperature}": rounds.rate,
            f"acceptance_length_at_{temperature}": rounds.length,
        }
    logger.info("%s", figures)
    write_json(figures, options.output / "figures.json")
