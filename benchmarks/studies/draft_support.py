"""How many tokens a draft should choose among: acceptance against bytes, for `residual`.

    python -m benchmarks.studies.draft_support

The chance that a token drawn from draft_probs is accepted is the sum of min(target_probs, draft_probs) over the
vocabulary, so it is computed and not sampled: for the demo pair on its own continuations of held-out prompts, and for
a pair with a vocabulary of 128k. No small checkpoint has such a vocabulary, so the latter is made: Gaussian logits
sharpened to the entropy of a language model have the Poisson-Dirichlet tail that natural text has, and the draft's are
the target's with noise added until the untruncated acceptance is the one asked for.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.prompts import held_out_prompts
from tandem.sampling.warping import warp
from tandem.types import SamplingParams

TOKEN_COUNT = 5
LARGE_VOCABULARY = 128_256
LARGE_ROWS = 64
ENTROPY_NATS = 2.5
AGREEMENT = 0.75

_MODELS = Path(__file__).resolve().parents[2] / "models" / "demo"


def demo_logits(prompt_count: int, token_count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Target's and draft's logits [token_count, vocabulary_size] along texts that the target wrote."""
    tokenizer = AutoTokenizer.from_pretrained(_MODELS / "target")
    models: list[Any] = [
        AutoModelForCausalLM.from_pretrained(_MODELS / name, dtype=torch.float32)
        for name in ("target", "draft")
    ]
    for index, prompt in enumerate(held_out_prompts(prompt_count)):
        torch.manual_seed(index)
        prompt_ids = tokenizer(prompt.text, return_tensors="pt").input_ids
        with torch.inference_mode():
            text = models[0].generate(
                prompt_ids,
                max_new_tokens=token_count,
                do_sample=True,
                top_k=0,
                pad_token_id=0,
                eos_token_id=None,
            )
            rows = [model(text).logits[0, prompt_ids.shape[1] - 1 : -1] for model in models]
        yield rows[0], rows[1]


def large_logits(nats: float = ENTROPY_NATS) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [LARGE_ROWS, LARGE_VOCABULARY] of a made pair with the wanted entropy and agreement."""
    generator = torch.Generator().manual_seed(1)
    shape = (LARGE_ROWS, LARGE_VOCABULARY)
    base, noise = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    scale = _bisect(lambda value: -_entropy(base * value), -nats, 1.0, 30.0)
    logits = base * scale
    spread = _bisect(lambda value: -_overlap(logits, logits + noise * value), -AGREEMENT, 0.0, 10.0)
    return logits, logits + noise * spread


def _bisect(rising: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Solve a rising function for a value by bisection."""
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return (low + high) / 2


def _entropy(logits: torch.Tensor) -> float:
    return float(torch.special.entr(logits.softmax(-1)).sum(-1).mean())


def _overlap(target_logits: torch.Tensor, draft_logits: torch.Tensor) -> float:
    return float(torch.minimum(target_logits.softmax(-1), draft_logits.softmax(-1)).sum(-1).mean())


BOUNDS = (
    (64, 1.0),
    (128, 0.97),
    (256, 0.97),
    (512, 0.95),
    (512, 0.97),
    (512, 0.99),
    (1024, 0.97),
    (2048, 0.97),
)
"""Maximum ids of a support, and the sufficient share of their probability."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """Supports with bounds on a pair's rows."""

    rate: float
    """Acceptance of one token."""
    ids: float
    """Mean ids of a support."""
    round_bytes: float
    """Mean bytes of TOKEN_COUNT supports as they travel today: ids and binary32 probabilities from the draft, then ids
    to the target, and binary32 probabilities from it. The verification has half of them."""
    short_bytes: float
    """The same with sorted ids as differences, and the draft's probabilities in bfloat16, from which it would sample.
    The target's stay as they are: with rounded ones acceptance would not be exact."""

    @property
    def tokens(self) -> float:
        """Expected tokens of a round with four proposed tokens."""
        return sum(self.rate**i for i in range(5))


def bounded(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], sampling: SamplingParams, size: int, mass: float
) -> Bounded:
    """The fewest of the `size` most probable ids that hold the mass, on all rows of all pairs of logits [R, V]."""
    rates, counts, today, short = [], [], [], []
    for target_logits, draft_logits in pairs:
        rows = [sampling] * len(target_logits)
        target_probs = warp(target_logits, rows)
        highest, columns = draft_logits.topk(min(size, draft_logits.shape[-1]), dim=-1)
        draft_probs = warp(highest, rows)
        is_kept = (draft_probs.cumsum(-1) - draft_probs) < mass
        draft_probs = torch.where(is_kept, draft_probs, 0.0)
        draft_probs = draft_probs / draft_probs.sum(-1, keepdim=True)
        rates.append(torch.minimum(target_probs.gather(-1, columns), draft_probs).sum(-1).numpy())
        for row_columns, row_kept in zip(columns, is_kept, strict=True):
            ids = np.sort(row_columns[row_kept].numpy())
            counts.append(len(ids))
            today.append(2 * _varint_bytes(ids) + 8 * len(ids))
            short.append(2 * _varint_bytes(np.diff(ids, prepend=0)) + 6 * len(ids))
    return Bounded(
        float(np.concatenate(rates).mean()),
        float(np.mean(counts)),
        TOKEN_COUNT * float(np.mean(today)),
        TOKEN_COUNT * float(np.mean(short)),
    )


def _varint_bytes(numbers: np.ndarray) -> int:
    """Bytes of non-negative numbers as protobuf's varints, of seven bits each."""
    return len(numbers) + sum(int(np.count_nonzero(numbers >= 1 << bits)) for bits in (7, 14, 21))


def _report_bounds(console: Console, title: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for temperature in (0.7, 1.0):
        sampling = SamplingParams(temperature=temperature)
        whole = bounded(pairs, sampling, pairs[0][0].shape[-1], 1.0)
        table = Table(
            *(
                "ids at most",
                "mass",
                "tokens, by all ids",
                "ids",
                f"bytes a round, K={TOKEN_COUNT}",
                "shorter",
            ),
            title=f"{title}, T {temperature:g}: {whole.tokens:.2f} tokens per pass with all ids, K=4",
        )
        for size, mass in BOUNDS:
            found = bounded(pairs, sampling, size, mass)
            table.add_row(
                str(size),
                f"{mass:g}",
                f"{found.tokens / whole.tokens:.3f}",
                f"{found.ids:.0f}",
                f"{found.round_bytes:.0f}",
                f"{found.short_bytes:.0f}",
            )
        console.print(table)


def measure(console: Console, prompt_count: int, token_count: int) -> None:
    """Print one table for each pair."""
    demo = list(demo_logits(prompt_count, token_count))
    _report_bounds(console, "demo pair", demo)
    _report_bounds(console, "made pair, 2.5 nats", [large_logits()])
    _report_bounds(console, "made pair, 4.5 nats", [large_logits(4.5)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    measure(Console(), arguments.prompts, arguments.tokens)
