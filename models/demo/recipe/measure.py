"""Held-out loss of a model, how much of the draft's text the target accepts, and how often the target repeats itself.

Run as `python -m models.demo.recipe.measure [--target DIR] [--draft DIR] [--dtype float32|bfloat16]`. A text loops when
some 8-gram occurs three times in it. Source code repeats shorter ones rightly: the end of a line, an indentation and
`self.` are four tokens.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from models.demo.recipe.architecture import (
    END_OF_TEXT_ID,
    Continuation,
    continue_text,
    load_model,
    read_states,
)
from models.demo.recipe.corpus import load_tokenizer

LOOP_NGRAM = 8
LOOP_COUNT = 3
REPEATED_NGRAM = 4


def loops(tokens: Sequence[int]) -> bool:
    """True if some 8-gram occurs three times, overlapping occurrences counted."""
    counts = Counter(_ngrams(tokens, LOOP_NGRAM))
    return max(counts.values(), default=0) >= LOOP_COUNT


def repeated_share(tokens: Sequence[int], size: int = REPEATED_NGRAM) -> float:
    """The share of n-grams that occurred before: 1 - distinct / all (Welleck et al. 2019, seq-rep-n)."""
    ngrams = _ngrams(tokens, size)
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def _ngrams(tokens: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)]


DEMO_FOLDER = Path(__file__).parents[1]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AcceptanceFigures:
    """Counts of a run of speculative decoding in which every round drafts `drafted_per_round` tokens."""

    rounds: int
    accepted: int
    drafted_per_round: int

    @property
    def rate(self) -> float:
        """Accepted tokens per drafted token."""
        return self.accepted / (self.rounds * self.drafted_per_round)

    @property
    def length(self) -> float:
        """Tokens emitted per round, the target's own one included."""
        return 1 + self.accepted / self.rounds


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, stream: Tensor, length: int = 512) -> float:
    """Mean loss in nats per token over a held-out stream, cut into windows."""
    count = (len(stream) - 1) // length
    windows = torch.stack([stream[i * length : (i + 1) * length + 1] for i in range(count)]).long()
    total = 0.0
    for batch in torch.split(windows, 8):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        total += functional.cross_entropy(
            logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"
        ).item()
    return total / (count * length)


@dataclass(frozen=True)
class RepetitionFigures:
    """How a model's greedy texts repeat themselves."""

    texts: int
    looping: int
    """Texts with an 8-gram that occurs three times."""
    repeated_share: float
    """Mean share of a text's 4-grams that occurred in it before."""


def measure_repetition(
    target: LlamaForCausalLM, prompts: Sequence[Sequence[int]], new_tokens: int = 96
) -> RepetitionFigures:
    """The repetition in what the target writes greedily after each prompt; the prompt itself does not count."""
    written = continue_text(target, prompts, new_tokens, temperature=0.0, seed=0)
    texts = [
        row[: row.index(END_OF_TEXT_ID)] if END_OF_TEXT_ID in row else row
        for row in written.tokens[:, -new_tokens:].tolist()
    ]
    share = sum(map(repeated_share, texts)) / len(texts)
    return RepetitionFigures(len(texts), sum(map(loops, texts)), share)


def measure_acceptance(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    drafted_per_round: int = 4,
    new_tokens: int = 128,
    seed: int = 7,
) -> AcceptanceFigures:
    """The acceptance of exact speculative decoding: greedy at temperature 0, else residual sampling.

    No rounds need to be run. Speculative decoding emits the target's own text, and a token that it emits was an
    accepted draft token with probability min(1, draft's probability / target's probability). So the target
    writes its text, and a coin with that probability is thrown for every token.
    """
    # The last round may begin at the last token and still drafts, and has judged, all of its tokens.
    written = continue_text(target, prompts, new_tokens + drafted_per_round, temperature, seed)
    is_accepted = _acceptable_tokens(
        target, draft, written, new_tokens + drafted_per_round, temperature, seed
    )
    texts = written.tokens[:, -is_accepted.size(1) :]
    rounds = accepted = 0
    for tokens, flags in zip(texts.tolist(), is_accepted.tolist(), strict=True):
        length = tokens.index(END_OF_TEXT_ID) + 1 if END_OF_TEXT_ID in tokens else len(tokens)
        position = 0
        while position < min(length, new_tokens):
            run = _run_length(flags[position : min(position + drafted_per_round, length)])
            rounds, accepted, position = rounds + 1, accepted + run, position + run + 1
    return AcceptanceFigures(rounds, accepted, drafted_per_round)


@torch.no_grad()
def _acceptable_tokens(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    written: Continuation,
    count: int,
    temperature: float,
    seed: int,
) -> Tensor:
    """For each of the last `count` tokens, whether a draft would have had it accepted: [rows, count]."""
    chosen = written.tokens[:, -count:]
    draft_states = read_states(draft, written.tokens[:, :-1], written.mask[:, :-1])
    draft_logits = draft.lm_head(draft_states[:, -count:]).float()
    if temperature == 0:
        return torch.eq(draft_logits.argmax(dim=-1), chosen)
    target_logits = target.lm_head(written.hidden[:, -count:]).float()
    target_log_probs = _log_probs_of(chosen, target_logits / temperature)
    draft_log_probs = _log_probs_of(chosen, draft_logits / temperature)
    coins = torch.rand(chosen.shape, generator=torch.Generator().manual_seed(seed + 1))
    is_accepted: Tensor = coins < (draft_log_probs - target_log_probs).exp()
    return is_accepted


def _log_probs_of(chosen: Tensor, logits: Tensor) -> Tensor:
    return logits.log_softmax(dim=-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)


def _run_length(flags: Sequence[bool]) -> int:
    return flags.index(False) if False in flags else len(flags)


def main() -> None:
    """Measure the acceptance of a pair on the held-out prompts."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--target", type=Path, default=DEMO_FOLDER / "target")
    parser.add_argument("--draft", type=Path, default=DEMO_FOLDER / "draft")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--prompts", type=Path, default=DEMO_FOLDER / "heldout_prompts.json")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8, 1.0])
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")

    dtype = getattr(torch, arguments.dtype)
    target, draft = (load_model(folder, dtype) for folder in (arguments.target, arguments.draft))
    tokenizer = load_tokenizer(arguments.target)
    texts = [entry["prompt"] for entry in json.loads(arguments.prompts.read_text(encoding="utf-8"))]
    prompts = tokenizer(texts)["input_ids"]
    repetition = measure_repetition(target, prompts)
    logger.info(
        "%s, greedy, 96 tokens: %d of %d texts loop, %.3f of the 4-grams are repeated",
        arguments.dtype,
        repetition.looping,
        repetition.texts,
        repetition.repeated_share,
    )
    for temperature in arguments.temperature:
        figures = measure_acceptance(target, draft, prompts, temperature)
        logger.info(
            "%s, temperature %.1f, K=%d, %d prompts: acceptance rate %.3f, %.2f tokens per pass",
            arguments.dtype,
            temperature,
            figures.drafted_per_round,
            len(prompts),
            figures.rate,
            figures.length,
        )


if __name__ == "__main__":
    main()
