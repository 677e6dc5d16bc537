"""How many tokens a draft should choose among: acceptance against bytes, for `residual`.

    python -m benchmarks.draft_support

The chance that a token drawn from draft_probs is accepted is the sum of min(target_probs, draft_probs) over the
vocabulary, so it is computed and not sampled: for the demo pair on its own continuations of held-out prompts, and for
a pair with a vocabulary of 128k. No small checkpoint has such a vocabulary, so the latter is made: Gaussian logits
sharpened to the entropy of a language model have the Poisson-Dirichlet tail that natural text has, and the draft's are
the target's with noise added until the untruncated acceptance is the one asked for.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.prompts import held_out_prompts
from tandem.types import Delta, RowKind, SamplingParams, SupportRow, Verification, VerifyStep
from tandem.warping import warp
from tandem.wire import target

SIZES = (8, 16, 32, 64, 128)
TOKEN_COUNT = 5
LARGE_VOCABULARY = 128_256
LARGE_ROWS = 64
ENTROPY_NATS = 2.5
AGREEMENT = 0.75

_MODELS = Path(__file__).resolve().parents[1] / "models" / "demo"


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


def large_logits() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [LARGE_ROWS, LARGE_VOCABULARY] of a made pair with the wanted entropy and agreement."""
    generator = torch.Generator().manual_seed(1)
    shape = (LARGE_ROWS, LARGE_VOCABULARY)
    base, noise = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    scale = _bisect(lambda value: -_entropy(base * value), -ENTROPY_NATS, 1.0, 30.0)
    logits = base * scale
    spread = _bisect(lambda value: -_overlap(logits, logits + noise * value), -AGREEMENT, 0.0, 10.0)
    return logits, logits + noise * spread


def _bisect(rising: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Where a rising function has the wanted value."""
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return (low + high) / 2


def _entropy(logits: torch.Tensor) -> float:
    return float(torch.special.entr(logits.softmax(-1)).sum(-1).mean())


def _overlap(target_logits: torch.Tensor, draft_logits: torch.Tensor) -> float:
    return float(torch.minimum(target_logits.softmax(-1), draft_logits.softmax(-1)).sum(-1).mean())


def acceptance(
    target_logits: torch.Tensor, draft_logits: torch.Tensor, sampling: SamplingParams, size: int
) -> np.ndarray:
    """For each row the chance that a token of the draft's `size` most probable ones is accepted, float64 [R]."""
    rows = [sampling] * len(target_logits)
    target_probs = warp(target_logits, rows)
    highest, columns = draft_logits.topk(size, dim=-1)
    draft_probs = warp(highest, rows)
    result: np.ndarray = torch.minimum(target_probs.gather(-1, columns), draft_probs).sum(-1).numpy()
    return result


def round_bytes(size: int, vocabulary_size: int) -> int:
    """Serialised request and response of one verification of TOKEN_COUNT tokens with full supports."""
    support = np.linspace(0, vocabulary_size - 1, size).astype(np.int64)
    row = SupportRow(support, np.full(size, 1.0 / size), 0.5, vocabulary_size - 1)
    bonus = SupportRow(support[:0], np.empty(0), 1.0, vocabulary_size - 1)
    delta = Delta(4000, [vocabulary_size - 1] * (TOKEN_COUNT + 1))
    step = VerifyStep(delta, RowKind.SUPPORT, TOKEN_COUNT + 1, (support,) * TOKEN_COUNT)
    answer = Verification(4000, (*[row] * TOKEN_COUNT, bonus))
    return target.step_to_proto(step).ByteSize() + target.verification_to_proto(answer).ByteSize()


def measure(console: Console, prompt_count: int, token_count: int) -> None:
    """Print one table for each pair."""
    demo = list(demo_logits(prompt_count, token_count))
    _report(console, "demo pair", demo, demo[0][0].shape[-1])
    made = large_logits()
    title = f"made pair, {LARGE_VOCABULARY} tokens, {ENTROPY_NATS} nats, {AGREEMENT:.0%} overlap"
    _report(console, title, [made], LARGE_VOCABULARY)


def _report(
    console: Console, title: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], vocabulary_size: int
) -> None:
    samplings = {
        "T 0.7": SamplingParams(temperature=0.7),
        "T 1": SamplingParams(temperature=1.0),
        "T 1, top-p 0.9": SamplingParams(temperature=1.0, top_p=0.9),
    }
    table = Table("draft_top_k", f"bytes a round, K={TOKEN_COUNT}", *samplings, title=title)
    for size in (*SIZES, vocabulary_size):
        rates = [
            np.concatenate(
                [acceptance(target_rows, draft_rows, sampling, size) for target_rows, draft_rows in pairs]
            )
            for sampling in samplings.values()
        ]
        name = "all" if size == vocabulary_size else str(size)
        table.add_row(
            name, str(round_bytes(size, vocabulary_size)), *[f"{rate.mean():.4f}" for rate in rates]
        )
    console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    measure(Console(), arguments.prompts, arguments.tokens)
