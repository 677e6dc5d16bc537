"""Measures how often the target accepts each token of an EAGLE-3 head's proposals, beside the standalone draft's.

Run as `python -m models.demo.recipe.heads.measure_head`. The first token of a proposal is read from the target's
states, the later ones from the head's own: what is lost between them is the price of own states, and what the first one
lacks of the standalone draft is the head's own weakness.
"""

import argparse
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from models.demo.recipe.architecture import continue_text, load_model
from models.demo.recipe.corpus import load_tokenizer
from models.demo.recipe.heads.eagle3 import (
    DEMO_FOLDER,
    SEED,
    STEPS,
    HeadLessons,
    acceptance,
    target_logits,
    unrolled_logits,
    with_states,
)
from models.demo.recipe.measure import measure_acceptance
from tandem.engine.models import loading
from tandem.engine.models.heads.eagle3 import Eagle3Head, load_eagle3, read_eagle3_config

PROMPT_LENGTH = 20
NEW_TOKENS = 128

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drafted:
    """Of one draft at one temperature."""

    rate: float
    """Accepted per drafted token, four a round."""
    length: float
    """Tokens per round."""
    by_position: tuple[float, ...]
    """Acceptance of the proposal's first, second ... token, where those before it are the text's own."""


def overlap(wanted: Tensor, own: Tensor, temperature: float) -> Tensor:
    """The probability that a token drawn from `own` is accepted: logits [..., vocabulary] each, the result [...].

    1 - TV(target, draft) (Leviathan et al. 2023, corollary 3.6); at temperature 0 whether both choose the same token.
    """
    if temperature == 0.0:
        return torch.eq(wanted.argmax(-1), own.argmax(-1)).float()
    probabilities = ((each / temperature).softmax(-1) for each in (wanted, own))
    return torch.minimum(*probabilities).sum(-1)


@torch.no_grad()
def head_figures(
    head: Eagle3Head, target: LlamaForCausalLM, written: HeadLessons, start: int, temperature: float
) -> Drafted:
    """A head's figures on texts that the target wrote from `start` on."""
    rate, length = acceptance(head, target, written, start, temperature)
    by_position = [
        overlap(target_logits(target, written, k), logits, temperature)[:, start:].mean().item()
        for k, logits in unrolled_logits(head, written)
    ]
    return Drafted(rate, length, tuple(by_position))


@torch.no_grad()
def draft_figures(
    draft: LlamaForCausalLM,
    target: LlamaForCausalLM,
    written: HeadLessons,
    prompts: list[list[int]],
    temperature: float,
) -> Drafted:
    """The standalone draft's. It reads the text alone, so each of its tokens is as likely to be accepted."""
    figures = measure_acceptance(target, draft, prompts, temperature, STEPS, NEW_TOKENS, SEED)
    own = draft(input_ids=written.tokens, use_cache=False).logits
    same = overlap(target.lm_head(written.last.float()), own, temperature)[:, len(prompts[0]) :].mean()
    return Drafted(figures.rate, figures.length, (same.item(),) * STEPS)


def main() -> None:
    """Measure the head and the standalone draft on the held-out prompts."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--target", type=Path, default=DEMO_FOLDER / "target")
    parser.add_argument("--draft", type=Path, default=DEMO_FOLDER / "draft")
    parser.add_argument("--head", type=Path, default=DEMO_FOLDER / "eagle3")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")

    target, draft = load_model(options.target), load_model(options.draft)
    head = load_eagle3(read_eagle3_config(options.head), loading.load_model(options.target, dtype="float32"))
    texts = json.loads((DEMO_FOLDER / "heldout_prompts.json").read_text(encoding="utf-8"))
    ids = load_tokenizer(options.target)([each["prompt"] for each in texts])["input_ids"]
    prompts = [each[:PROMPT_LENGTH] for each in ids if len(each) >= PROMPT_LENGTH]
    for temperature in (0.0, 0.8):
        tokens = continue_text(target, prompts, NEW_TOKENS + STEPS, temperature, SEED).tokens
        written = with_states(target, tokens, head.layer_ids)
        for name, figures in (
            ("head", head_figures(head, target, written, PROMPT_LENGTH, temperature)),
            ("draft", draft_figures(draft, target, written, prompts, temperature)),
        ):
            logger.info(
                "temperature %.1f, %s: acceptance rate %.3f, %.2f tokens per round, by position %s",
                temperature,
                name,
                figures.rate,
                figures.length,
                " ".join(f"{each:.3f}" for each in figures.by_position),
            )


if __name__ == "__main__":
    main()
