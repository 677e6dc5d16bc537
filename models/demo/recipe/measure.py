"""How much of a draft's text the target accepts, and a held-out loss."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from models.demo.recipe.architecture import END_OF_TEXT_ID, Continuation, continue_text, read_states
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
    flags = are_accepted(own, wanted, chosen, temperature, coins)
    texts = []
    for tokens, accepted in zip(chosen.tolist(), flags.tolist(), strict=True):
        length = tokens.index(END_OF_TEXT_ID) + 1 if END_OF_TEXT_ID in tokens else len(tokens)
        ends = (min(place + DRAFTED_PER_ROUND, length) for place in range(min(length, NEW_TOKENS)))
        texts.append([accepted[place:end] for place, end in enumerate(ends)])
    return rounds_of(texts, DRAFTED_PER_ROUND)


Compared = tuple[Tensor, Tensor, Tensor]
"""Logits [rows, places, K, vocabulary] of a head and of the target, and the tokens of the text [rows, places, K], where
a proposal of K tokens at each place begins with the place's token."""


@torch.no_grad()
def measured_head(
    target: LlamaForCausalLM,
    folder: Path,
    proposed: int,
    seed: int,
    compare: Callable[[Continuation], Iterator[Compared]],
) -> dict[str, Any]:
    """The fields of a head's figures.json: its acceptance behind the held-out prompts that are long enough, cut to the
    same length."""
    prompts = [each[:PROMPT_TOKENS] for each in held_out_ids(folder) if len(each) >= PROMPT_TOKENS]
    figures: dict[str, Any] = {}
    for temperature in (0.0, 0.8):
        written = continue_text(target, prompts, NEW_TOKENS + proposed, temperature, seed)
        accepted, coins = [], torch.Generator().manual_seed(seed)
        for own, wanted, chosen in compare(written):
            flags = are_accepted(own, wanted, chosen, temperature, coins)
            accepted += flags[:, PROMPT_TOKENS - 2 :].tolist()
        found = rounds_of(accepted, proposed)
        rates = [round(each / found.count, 4) for each in found.by_position]
        figures |= {
            f"acceptance_rates_per_position_at_{temperature}": rates,
            f"acceptance_rate_at_{temperature}": found.rate,
            f"acceptance_length_at_{temperature}": found.length,
        }
    logger.info("%s", figures)
    return figures


def parser_of(about: str | None, head: str = "") -> argparse.ArgumentParser:
    """A command's parser, with the options that the recipes of heads share; its log goes to stderr."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    parser = argparse.ArgumentParser(description=about)
    if head:
        parser.add_argument("--target", type=Path, default=DEMO_FOLDER / "target")
        parser.add_argument("--output", type=Path, default=DEMO_FOLDER / head)
        parser.add_argument("--minutes-reading", type=float, default=1.0)
    return parser
