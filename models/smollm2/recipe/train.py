"""Trains an EAGLE-3 head for SmolLM2 on the states that `answers` left.

Run as `python -m models.smollm2.recipe.train ANSWERS HEAD --minutes 25`. The head is saved every few minutes. As in
the paper (Li et al. 2025, arXiv 2503.01840, section 3.1) it learns the later tokens of a proposal on its own states.
"""

import argparse
import itertools
import logging
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.demo.recipe.heads.eagle3 import (
    MATRIX_LR,
    OTHER_LR,
    SEED,
    STEP_WEIGHT,
    STEPS,
    new_head,
    save,
    unrolled_states,
)
from models.demo.recipe.training import (
    Every,
    Optimizers,
    TimeBox,
    decayed,
    kl_divergence,
    mixed_total_variation,
)
from models.smollm2.recipe.answers import Batch, endless_batches, frequent_tokens, read_batch
from tandem.engine.models import loading
from tandem.engine.models.heads.eagle3 import Eagle3Head
from tandem.model_sources.bundled import SMOLLM2
from tandem.model_sources.find import find_model

DRAFT_VOCABULARY_SIZE = 4096
ROWS_PER_BATCH = 8
BATCHES_AT_ONCE = 2
"""Computed by as many threads, each with a batch of its own: on cores that other work keeps busy, threads that share
each operation wait for one another."""
TOTAL_VARIATION_FROM = 0.75
STEPS_FROM = {0.65: 3, 0.35: 2, 0.0: 1}
"""Tokens of a proposal that the head is trained on, by the share of the time from which on: each costs as much as the
first, which has to be right for any other to count."""
SAVE_SECONDS = 180

logger = logging.getLogger(__name__)


class LastLayer(nn.Module):
    """The target's last norm, and the rows of its output layer that the draft vocabulary has."""

    def __init__(self, folder: Path, target_ids: Tensor) -> None:
        super().__init__()
        target = loading.load_model(folder, dtype="float32").module
        self.norm: nn.Module = target.get_submodule("model.norm")
        weight = target.get_submodule("lm_head").get_parameter("weight")
        self.weight = nn.Parameter(weight[target_ids].detach().clone(), requires_grad=False)

    def forward(self, states: Tensor) -> Tensor:
        """Logits over the draft vocabulary."""
        return functional.linear(self.norm(states.float()), self.weight).float()


def foreseen(head: Eagle3Head, last: LastLayer, batch: Batch, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each token of a proposal: the head's and the target's logits [tokens, draft vocabulary] where the text goes
    on with a token of an answer that the draft vocabulary has."""
    target_ids: Tensor = head.target_ids  # type: ignore[assignment]  # a registered buffer
    tokens, mask = batch.lessons.tokens, batch.mask.clone()
    mask[:, :-1] &= torch.isin(tokens[:, 1:], target_ids) | ~batch.mask[:, 1:]
    wanted = last(batch.lessons.last[mask])
    places = torch.full(mask.shape, -1).masked_scatter_(mask, torch.arange(len(wanted)))
    for k, states in unrolled_states(head, batch.lessons, steps):
        chosen = places[:, k + 1 : k + 1 + states.shape[1]]
        yield head.lm_head(states[chosen >= 0]).float(), wanted[chosen[chosen >= 0]]


def train(
    head: Eagle3Head, last: LastLayer, answers: Path, folder: Path, minutes: float, held_out: Path | None
) -> int:
    """Train the head in place until the time is up, and save it now and then; returns the tokens seen."""
    optimizers, box = Optimizers(head, MATRIX_LR, OTHER_LR), TimeBox(minutes)
    report, saving = Every(20), Every(SAVE_SECONDS)
    batches = endless_batches(answers, ROWS_PER_BATCH, torch.Generator().manual_seed(SEED))
    parameters = [each for each in head.parameters() if each.requires_grad]
    seen = 0

    def gradients(batch: Batch) -> tuple[Tensor, ...]:
        loss = _loss(head, last, batch, box.fraction)
        if report.is_due():
            logger.info("%.3f of the time, %d tokens of answers, loss %.4f", box.fraction, seen, loss.item())
        return torch.autograd.grad(loss / BATCHES_AT_ONCE, parameters)

    with ThreadPoolExecutor(BATCHES_AT_ONCE) as pool:
        while not box.is_over:
            chosen = list(itertools.islice(batches, BATCHES_AT_ONCE))
            for parameter, *parts in zip(parameters, *pool.map(gradients, chosen), strict=True):
                parameter.grad = torch.stack(parts).sum(0)
            nn.utils.clip_grad_norm_(parameters, 1.0)
            with torch.autocast("cpu", torch.bfloat16):
                optimizers.step(decayed(box.fraction))
            seen += sum(int(batch.mask.sum()) for batch in chosen)
            if saving.is_due() or box.is_over:
                save(head, folder)
                if held_out is not None:
                    logger.info("held-out agreement: %s", agreement(head, last, held_out))
    return seen


def _loss(head: Eagle3Head, last: LastLayer, batch: Batch, fraction: float) -> Tensor:
    compare = kl_divergence if fraction < TOTAL_VARIATION_FROM else mixed_total_variation
    steps = next(steps for start, steps in STEPS_FROM.items() if fraction >= start)
    total = torch.zeros(())
    with torch.autocast("cpu", torch.bfloat16):
        for k, (own, wanted) in enumerate(foreseen(head, last, batch, steps)):
            total = total + STEP_WEIGHT**k * compare(wanted, own)
    return total


@torch.no_grad()
def agreement(head: Eagle3Head, last: LastLayer, answers: Path) -> str:
    """Share of each token of a proposal that the target chooses too, at temperature 0, where those before it are the
    text's own, and where the target's choice is in the draft vocabulary."""
    batch = read_batch(sorted(answers.glob("*.safetensors"))[:24])
    with torch.autocast("cpu", torch.bfloat16):
        pairs = list(foreseen(head, last, batch, STEPS))
    shares = [(own.argmax(-1) == wanted.argmax(-1)).float().mean().item() for own, wanted in pairs]
    return " ".join(f"{each:.3f}" for each in shares)


def main() -> None:
    """Train an EAGLE-3 head for SmolLM2."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("answers", type=Path)
    parser.add_argument("head", type=Path)
    parser.add_argument("--held-out", type=Path, help="files of held-out answers, to look at now and then")
    parser.add_argument("--minutes", type=float, default=25.0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")

    torch.set_num_threads(1)
    target = find_model(SMOLLM2)
    head = new_head(target, options.head, frequent_tokens(options.answers, DRAFT_VOCABULARY_SIZE))
    last = LastLayer(target, head.target_ids)  # type: ignore[arg-type]  # a registered buffer
    seen = train(head, last, options.answers, options.head, options.minutes, options.held_out)
    logger.info("%d tokens of answers seen", seen)


if __name__ == "__main__":
    main()
