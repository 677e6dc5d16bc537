"""Trains an EAGLE-3 head for SmolLM2 on the states that `answers` left.

Run as `python -m models.smollm2.recipe.train ANSWERS HEAD --minutes 25`, and once more with `--from HEAD` and other
answers. The head is saved every few minutes. As in the paper (Li et al. 2025, arXiv 2503.01840, section 3.1) it learns
the later tokens of a proposal on its own states.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.demo.recipe.architecture import Texts
from models.demo.recipe.heads import HEAD_MATRIX_LR, HEAD_OTHER_LR, STEP_WEIGHT
from models.demo.recipe.heads.eagle3 import SEED, new_head, save, unrolled_states
from models.demo.recipe.measure import PROPOSED, parser_of
from models.demo.recipe.training import divergence, train_until_over
from models.smollm2.recipe.answers import endless_batches, frequent_tokens, read_batch
from tandem.engine.models import loading
from tandem.engine.models.heads.eagle import Eagle3Head
from tandem.model_sources.bundled import SMOLLM2
from tandem.model_sources.find import find_model

STEPS_FROM = {0.65: 3, 0.35: 2, 0.0: 1}
"""Tokens of a proposal that the head is trained on, by the share of the time from which on: each costs as much as the
first, which has to be right for any other to count. A trained head learns all four."""
AGAIN_RATE = 0.6
"""Share of the learning rates at which a trained head goes on; the second training had 0.4."""

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


def foreseen(head: Eagle3Head, last: LastLayer, batch: Texts, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each token of a proposal: the head's and the target's logits [tokens, draft vocabulary] where the text goes
    on with a token of an answer that the draft vocabulary has."""
    target_ids: Tensor = head.target_ids  # type: ignore[assignment]  # a registered buffer
    assert batch.mask is not None
    tokens = batch.tokens
    mask = batch.mask.clone()
    mask[:, :-1] &= torch.isin(tokens[:, 1:], target_ids) | ~batch.mask[:, 1:]
    wanted = last(batch.hidden[mask])
    places = torch.full(mask.shape, -1).masked_scatter_(mask, torch.arange(len(wanted)))
    for k, states in unrolled_states(head, batch, steps):
        chosen = places[:, k + 1 : k + 1 + states.shape[1]]
        yield head.lm_head(states[chosen >= 0]).float(), wanted[chosen[chosen >= 0]]


@torch.no_grad()
def agreement(head: Eagle3Head, last: LastLayer, answers: Path) -> str:
    """Share of each token of a proposal that the target chooses too, at temperature 0, where those before it are the
    text's own, and where the target's choice is in the draft vocabulary."""
    batch = read_batch(sorted(answers.glob("*.safetensors"))[:24])
    with torch.autocast("cpu", torch.bfloat16):
        pairs = list(foreseen(head, last, batch, PROPOSED))
    shares = [(own.argmax(-1) == wanted.argmax(-1)).float().mean().item() for own, wanted in pairs]
    return " ".join(f"{each:.3f}" for each in shares)


def trained_head(trained: Path, target: Path, folder: Path) -> Eagle3Head:
    """A trained head with its draft vocabulary, to be trained again; its config is written to the folder."""
    loaded = loading.load_model(target, dtype="float32")
    old = Eagle3Head(trained).load(loaded)
    assert old.target_ids is not None
    head = new_head(target, folder, old.target_ids.tolist())
    head.load_state_dict(old.state_dict())
    return head


def main() -> None:
    """Train an EAGLE-3 head for SmolLM2."""
    parser = parser_of(main.__doc__)
    parser.add_argument("answers", type=Path)
    parser.add_argument("head", type=Path)
    parser.add_argument("--held-out", type=Path, help="files of held-out answers, to look at now and then")
    parser.add_argument("--from", dest="trained", type=Path, help="a trained head that goes on learning")
    parser.add_argument("--minutes", type=float, default=25.0)
    options = parser.parse_args()
    target = find_model(SMOLLM2)
    again = options.trained is not None
    head = (
        trained_head(options.trained, target, options.head)
        if again
        else new_head(target, options.head, frequent_tokens(options.answers, 4096))
    )
    last = LastLayer(target, head.target_ids)  # type: ignore[arg-type]  # a registered buffer
    batches = endless_batches(options.answers, 16, torch.Generator().manual_seed(SEED))

    def next_loss(fraction: float) -> tuple[Tensor, int]:
        batch = next(batches)
        compare = divergence(fraction, last_phase=0.6 if again else 0.75)
        steps = PROPOSED if again else next(steps for start, steps in STEPS_FROM.items() if fraction >= start)
        total = torch.zeros(())
        with torch.autocast("cpu", torch.bfloat16):
            for k, (own, wanted) in enumerate(foreseen(head, last, batch, steps)):
                total = total + STEP_WEIGHT**k * compare(wanted, own)
        assert batch.mask is not None
        return total, int(batch.mask.sum())

    def keep() -> None:
        save(head, options.head)
        if options.held_out is not None:
            logger.info("held-out agreement: %s", agreement(head, last, options.held_out))

    rate = AGAIN_RATE if again else 1.0
    rates = rate * HEAD_MATRIX_LR, rate * HEAD_OTHER_LR
    seen = train_until_over(head, next_loss, options.minutes, *rates, keep)
    keep()
    logger.info("%d tokens of answers seen", seen)


if __name__ == "__main__":
    main()
