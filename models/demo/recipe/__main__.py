"""Makes the bundled pair from nothing but a Python installation: `python -m models.demo.recipe`.

Every stage is bounded by the clock, so the run's length does not depend on the machine.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from models.demo.recipe.architecture import (
    MAX_LENGTH,
    build_model,
    draft_config,
    load_model,
    packed,
    save_folder,
    target_config,
    write_json,
)
from models.demo.recipe.corpus import functions, held_out_prompts, read_corpus, train_tokenizer
from models.demo.recipe.measure import DEMO_FOLDER, held_out_loss, measure_acceptance
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
    write_json(prompts, output / "heldout_prompts.json")
    logger.info("%d training tokens, %d held-out tokens", len(training), len(held_out))

    torch.manual_seed(SEED)
    model = build_model(target_config())
    target_tokens = pretrain(model, training, options.minutes_target)
    save_folder(model, tokenizer, output / "target")

    # The teacher is the target as shipped, rounded to bf16, since that is the one whose text the draft will foresee.
    target = load_model(output / "target")
    sources = [function.source for function in functions(corpus.training)]
    beginnings = tokenizer(sources, verbose=False)["input_ids"]
    read = read_corpus_lessons(target, training, options.minutes_reading, SEED)
    written = write_lessons(target, beginnings, options.minutes_writing, SEED)
    torch.manual_seed(SEED)
    draft = build_model(draft_config())
    adopt_embedding(draft, target)
    draft_tokens = distil(draft, target.lm_head, read, written, options.minutes_draft)
    save_folder(draft, tokenizer, output / "draft")

    figures = measure_pair(output, held_out, tokenizer([prompt["prompt"] for prompt in prompts])["input_ids"])
    counts = {"target_tokens_seen": target_tokens, "draft_tokens_seen": draft_tokens}
    write_json(counts | figures, output / "figures.json")


def measure_pair(folder: Path, held_out: Tensor, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Held-out losses and acceptance of the pair as shipped, computed in fp32."""
    target, draft = load_model(folder / "target"), load_model(folder / "draft")
    figures = {
        "target_held_out_loss": held_out_loss(target, held_out),
        "draft_held_out_loss": held_out_loss(draft, held_out),
    }
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
    for stage, minutes, purpose in (
        ("target", 49.5, "pretraining of the target"),
        ("reading", 2.5, "the target reads corpus for the draft"),
        ("writing", 9.0, "the target writes text for the draft"),
        ("draft", 22.0, "distillation of the draft"),
    ):
        parser.add_argument(f"--minutes-{stage}", type=float, default=minutes, help=purpose)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


if __name__ == "__main__":
    main()
