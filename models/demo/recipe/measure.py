"""How much of a draft's text the target accepts: `python -m models.demo.recipe.measure`. Also a held-out loss."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from models.demo.recipe.architecture import END_OF_TEXT_ID, continue_text, load_model, read_states
from models.demo.recipe.corpus import load_tokenizer

DEMO_FOLDER = Path(__file__).parents[1]
PROMPT_TOKENS = 20
"""Tokens of the prompts behind which drafting heads are measured."""
NEW_TOKENS = 128
"""Length of the completions behind them."""
TEMPERATURES = (0.0, 0.8, 1.0)
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rounds:
    """Counts of rounds of speculative decoding in which every proposal has as many tokens."""

    count: int
    by_position: tuple[int, ...]
    """Rounds in which the first, second, ... token of the proposal and all before it were accepted."""

    @property
    def rate(self) -> float:
        """Accepted tokens per drafted token."""
        return sum(self.by_position) / (self.count * len(self.by_position))

    @property
    def length(self) -> float:
        """Tokens emitted per round, the target's own one included."""
        return 1 + sum(self.by_position) / self.count

    def figures(self, temperature: float) -> dict[str, Any]:
        """The fields of a head's figures.json."""
        rates = [round(each / self.count, 4) for each in self.by_position]
        return {
            f"acceptance_rates_per_position_at_{temperature}": rates,
            f"acceptance_rate_at_{temperature}": self.rate,
            f"acceptance_length_at_{temperature}": self.length,
        }


def rounds_of(texts: Iterable[Sequence[Sequence[bool]]], proposed: int) -> Rounds:
    """The rounds in which texts come about: for each text, True for each token of a proposal of so many tokens at each
    of its places that is accepted."""
    runs = [0] * (proposed + 1)
    for text in texts:
        place = 0
        while place < len(text):
            run = list(text[place]).index(False) if False in text[place] else len(text[place])
            runs[run] += 1
            place += run + 1
    return Rounds(sum(runs), tuple(sum(runs[k:]) for k in range(1, proposed + 1)))


def are_accepted(
    own: Tensor, wanted: Tensor, chosen: Tensor, temperature: float, generator: torch.Generator
) -> Tensor:
    """True for the tokens of the target's own text that a draft would have had accepted.

    No rounds need to be run. Speculative decoding emits the target's own text, and a token that it emits was an
    accepted draft token with probability min(1, draft's probability / target's probability). So the target writes its
    text, and a coin with that probability is thrown for every token; at temperature 0 the draft's argmax decides.
    `own` are the draft's logits, [..., vocabulary], `wanted` the target's, and `chosen` the text's tokens, [...].
    """
    if temperature == 0.0:
        return torch.eq(own.argmax(-1), chosen)
    own, wanted = (
        (each / temperature).log_softmax(-1).gather(-1, chosen[..., None])[..., 0] for each in (own, wanted)
    )
    return torch.rand(own.shape, generator=generator) < (own - wanted).exp()


def held_out_ids(folder: Path) -> list[list[int]]:
    """Token ids of the held-out prompts, by the tokenizer of a folder."""
    texts = json.loads((DEMO_FOLDER / "heldout_prompts.json").read_text(encoding="utf-8"))
    ids: list[list[int]] = load_tokenizer(folder)([each["prompt"] for each in texts])["input_ids"]
    return ids


def short_prompts(folder: Path) -> list[list[int]]:
    """The first tokens of the held-out prompts that are long enough: heads are measured behind equally long prompts."""
    return [each[:PROMPT_TOKENS] for each in held_out_ids(folder) if len(each) >= PROMPT_TOKENS]


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


DRAFTED_PER_ROUND = 4
SEED = 7


def measure_acceptance(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, prompts: Sequence[Sequence[int]], temperature: float
) -> Rounds:
    """The acceptance of exact speculative decoding: greedy at temperature 0, else residual sampling."""
    # The last round may begin at the last token and still drafts, and has judged, all of its tokens.
    count = NEW_TOKENS + DRAFTED_PER_ROUND
    written = continue_text(target, prompts, count, temperature, SEED)
    chosen = written.tokens[:, -count:]
    with torch.no_grad():
        states = read_states(draft, written.tokens[:, :-1], written.mask[:, :-1])
        own, wanted = draft.lm_head(states[:, -count:]), target.lm_head(written.hidden[:, -count:])
    coins = torch.Generator().manual_seed(SEED + 1)
    flags = are_accepted(own.float(), wanted.float(), chosen, temperature, coins)
    texts = []
    for tokens, accepted in zip(chosen.tolist(), flags.tolist(), strict=True):
        length = tokens.index(END_OF_TEXT_ID) + 1 if END_OF_TEXT_ID in tokens else len(tokens)
        ends = (min(place + DRAFTED_PER_ROUND, length) for place in range(min(length, NEW_TOKENS)))
        texts.append([accepted[place:end] for place, end in enumerate(ends)])
    return rounds_of(texts, DRAFTED_PER_ROUND)


def parser_of(about: str | None, head: str = "") -> argparse.ArgumentParser:
    """A command's parser, with the options that the recipes of heads share; its log goes to stderr."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    parser = argparse.ArgumentParser(description=about)
    if head:
        parser.add_argument("--target", type=Path, default=DEMO_FOLDER / "target")
        parser.add_argument("--output", type=Path, default=DEMO_FOLDER / head)
        parser.add_argument("--minutes-reading", type=float, default=1.0)
    return parser


def main() -> None:
    """Measure the acceptance of a pair on the held-out prompts."""
    parser = parser_of(main.__doc__)
    parser.add_argument("--target", type=Path, default=DEMO_FOLDER / "target")
    parser.add_argument("--draft", type=Path, default=DEMO_FOLDER / "draft")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    target, draft = (
        load_model(each, getattr(torch, options.dtype)) for each in (options.target, options.draft)
    )
    prompts = held_out_ids(options.target)
    for temperature in TEMPERATURES:
        found = measure_acceptance(target, draft, prompts, temperature)
        words = "temperature %.1f: acceptance rate %.3f, %.2f tokens per pass"
        logger.info(words, temperature, found.rate, found.length)


if __name__ == "__main__":
    main()
