"""Makes the bundled pair from nothing but a Python installation: `python -m models.demo.recipe`.

Every stage is bounded by the clock, so the run's length does not depend on the machine.
"""

import logging
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from models.demo.recipe.architecture import (
    MAX_LENGTH,
    draft_config,
    load_model,
    packed,
    save_folder,
    target_config,
    write_json,
)
from models.demo.recipe.corpus import held_out_prompts, read_corpus, train_tokenizer
from models.demo.recipe.measure import DEMO_FOLDER, held_out_loss, measure_acceptance, options_of
from models.demo.recipe.training import adopt_embedding, distil, lessons_of, pretrain

SEED = 0
"""The seed of the checked-in pair."""

logger = logging.getLogger("models.demo.recipe")


def main() -> None:
    """Train the tokenizer, the target and the draft, and measure them as shipped, in fp32."""
    minutes = {"minutes_target": 49.5, "minutes_reading": 2.5, "minutes_writing": 9.0, "minutes_draft": 22.0}
    options = options_of(main.__doc__, DEMO_FOLDER, **minutes)
    output: Path = options.output

    corpus = read_corpus()
    unseen = read_corpus(held_out=True)
    tokenizer = train_tokenizer((file.text for file in corpus), MAX_LENGTH)
    training = packed(corpus, tokenizer)
    held_out = packed(unseen, tokenizer)
    prompts = held_out_prompts(unseen, tokenizer)
    write_json(prompts, output / "heldout_prompts.json")
    logger.info("%d training tokens, %d held-out tokens", len(training), len(held_out))

    torch.manual_seed(SEED)
    model = LlamaForCausalLM(target_config())
    figures: dict[str, float] = {"target_tokens_seen": pretrain(model, training, options.minutes_target)}
    save_folder(model, tokenizer, output / "target")

    # The teacher is the target as shipped, rounded to bf16, since that is the one whose text the draft will foresee.
    target = load_model(output / "target")
    lessons = lessons_of(target, output / "target", options.minutes_reading, options.minutes_writing, SEED)
    torch.manual_seed(SEED)
    draft = LlamaForCausalLM(draft_config())
    adopt_embedding(draft, target)
    figures["draft_tokens_seen"] = distil(draft, target.lm_head, lessons, options.minutes_draft)
    save_folder(draft, tokenizer, output / "draft")

    draft = load_model(output / "draft")
    figures["target_held_out_loss"] = held_out_loss(target, held_out)
    figures["draft_held_out_loss"] = held_out_loss(draft, held_out)
    ids = tokenizer([prompt["prompt"] for prompt in prompts])["input_ids"]
    for temperature in (0.0, 0.8, 1.0):
        rate = measure_acceptance(target, draft, ids, temperature).rate
        figures[f"acceptance_rate_at_temperature_{temperature}"] = rate
    logger.info("%s", figures)
    write_json(figures, output / "figures.json")


if __name__ == "__main__":
    main()
