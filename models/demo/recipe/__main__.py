"""Makes the bundled pair from nothing but a Python installation: `python -m models.demo.recipe`.

Every stage is bounded by the clock, so the run's length does not depend on the machine. An interrupted run resumes
the target's training from its last checkpoint.
"""

import argparse
import json
import logging
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from models.demo.recipe.architecture import (
    MAX_LENGTH,
    build_model,
    draft_config,
    load_model,
    packed,
    save_folder,
    target_config,
)
from models.demo.recipe.corpus import functions, held_out_prompts, read_corpus, train_tokenizer
from models.demo.recipe.measure import DEMO_FOLDER, held_out_loss, measure_acceptance, measure_repetition
from models.demo.recipe.training import adopt_embedding, distil, pretrain, read_corpus_lessons, write_lessons

SEED = 0

logger = logging.getLogger("models.demo.recipe")


def main() -> None:
    """Train the tokenizer, the target and the draft, and measure them."""
    options = _options()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    torch.set_num_threads(options.threads)
    # Denormal numbers, of which a decayed optimizer state has many, are a hundred times slower on a CPU.
    torch.set_flush_denormal(True)
    output: Path = options.output

    corpus = read_corpus()
    tokenizer = train_tokenizer((file.text for file in corpus.training), MAX_LENGTH)
    training, held_out = packed(corpus.training, tokenizer), packed(corpus.held_out, tokenizer)
    prompts = held_out_prompts(corpus.held_out, tokenizer)
    _write_json(prompts, output / "heldout_prompts.json")
    logger.info("%d training tokens, %d held-out tokens", len(training), len(held_out))

    checkpoint = output / ".work" / "target.pt"
    target_tokens = make_target(training, tokenizer, options.minutes_target, checkpoint, output / "target")
    target = load_model(output / "target")
    beginnings = tokenizer([function.source for function in functions(corpus.training)], verbose=False)[
        "input_ids"
    ]
    minutes = DraftMinutes(options.minutes_reading, options.minutes_writing, options.minutes_draft)
    draft_tokens = make_draft(target, training, beginnings, tokenizer, minutes, output / "draft")

    figures = measure_pair(output, held_out, tokenizer([prompt["prompt"] for prompt in prompts])["input_ids"])
    counts = {"target_tokens_seen": target_tokens, "draft_tokens_seen": draft_tokens}
    _write_json(counts | figures, output / "figures.json")
    shutil.rmtree(checkpoint.parent)


@dataclass(frozen=True)
class DraftMinutes:
    """How long each stage of making the draft takes."""

    reading: float
    writing: float
    distilling: float


def make_target(
    stream: Tensor, tokenizer: PreTrainedTokenizerFast, minutes: float, checkpoint: Path, folder: Path
) -> int:
    """Pretrain the target and write its folder; returns the tokens seen."""
    torch.manual_seed(SEED)
    model = build_model(target_config())
    tokens_seen = pretrain(model, stream, minutes, checkpoint)
    save_folder(model, tokenizer, folder)
    return tokens_seen


def make_draft(
    target: LlamaForCausalLM,
    stream: Tensor,
    beginnings: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerFast,
    minutes: DraftMinutes,
    folder: Path,
) -> int:
    """Distil the draft and write its folder; returns the tokens seen.

    The teacher is the target as shipped, rounded to bf16, since that is the one whose text the draft will foresee.
    """
    read = read_corpus_lessons(target, stream, minutes.reading, SEED)
    written = write_lessons(target, beginnings, minutes.writing, SEED)
    torch.manual_seed(SEED)
    draft = build_model(draft_config())
    adopt_embedding(draft, target)
    tokens_seen = distil(draft, target.lm_head, read, written, minutes.distilling)
    save_folder(draft, tokenizer, folder)
    return tokens_seen


def measure_pair(folder: Path, held_out: Tensor, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Held-out losses and acceptance of the pair as shipped, computed in fp32."""
    target, draft = load_model(folder / "target"), load_model(folder / "draft")
    figures = {
        "target_held_out_loss": held_out_loss(target, held_out),
        "draft_held_out_loss": held_out_loss(draft, held_out),
    }
    repetition = measure_repetition(target, prompts)
    figures["greedy_texts_that_loop"] = repetition.looping / repetition.texts
    figures["greedy_repeated_4_grams"] = repetition.repeated_share
    for temperature in (0.0, 0.8, 1.0):
        acceptance = measure_acceptance(target, draft, prompts, temperature)
        figures[f"acceptance_rate_at_temperature_{temperature}"] = acceptance.rate
    for name, value in figures.items():
        logger.info("%s: %.3f", name, value)
    return figures


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--output", type=Path, default=DEMO_FOLDER, help="where target/ and draft/ are written"
    )
    parser.add_argument("--minutes-target", type=float, default=49.5, help="pretraining of the target")
    parser.add_argument(
        "--minutes-reading", type=float, default=2.5, help="the target reads corpus for the draft"
    )
    parser.add_argument(
        "--minutes-writing", type=float, default=9.0, help="the target writes text for the draft"
    )
    parser.add_argument("--minutes-draft", type=float, default=22.0, help="distillation of the draft")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def _write_json(value: object, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
