"""How much of a draft's text the target accepts, and a held-out loss."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from models.demo.recipe.architecture import END_OF_TEXT_ID, continue_text, read_states

DEMO_FOLDER = Path(__file__).parents[1]
SEED = 7
PROPOSED = 4
"""Tokens of a proposal when acceptance is measured."""
NEW_TOKENS = 128
"""Length of the completions behind which acceptance is measured."""


@dataclass(frozen=True)
class Rounds:
    """Counts of rounds of speculative decoding in which every proposal has as many tokens."""

    count: int
    by_position: tuple[int, ...]
    """Rounds in which the first, second, ... token of the proposal and all before it were accepted."""

    @property
    def rate(self) -> float:
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


def measure_acceptance(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, prompts: Sequence[Sequence[int]], temperature: float
) -> Rounds:
    """The acceptance of exact speculative decoding: greedy at temperature 0, else residual sampling."""
    # The last round may begin at the last token and still drafts, and has judged, all of its tokens.
    count = NEW_TOKENS + PROPOSED
    written = continue_text(target, prompts, count, temperature, SEED)
    chosen = written.tokens[:, -count:]
    assert written.mask is not None
    with torch.no_grad():
        states = read_states(draft, written.tokens[:, :-1], written.mask[:, :-1])
        own = draft.lm_head(states[:, -count:])
        wanted = target.lm_head(written.hidden[:, -count:])
    coins = torch.Generator().manual_seed(SEED + 1)
    flags = are_accepted(own, wanted, chosen, temperature, coins)
    texts = []
    for tokens, accepted in zip(chosen.tolist(), flags.tolist(), strict=True):
        length = tokens.index(END_OF_TEXT_ID) + 1 if END_OF_TEXT_ID in tokens else len(tokens)
        ends = (min(place + PROPOSED, length) for place in range(min(length, NEW_TOKENS)))
        texts.append([accepted[place:end] for place, end in enumerate(ends)])
    return rounds_of(texts, PROPOSED)


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """A command's parser; its log goes to stderr."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    return argparse.ArgumentParser(description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter)


def options_of(about: str | None, output: Path, **minutes: float) -> argparse.Namespace:
    """The options of a recipe, with the minutes that each of its stages takes; torch runs as they say from here on."""
    parser = parser_of(about)
    add = parser.add_argument
    add("--output", type=Path, default=output, help="folder of what is made")
    add("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    for name, default in minutes.items():
        add(f"--{name.replace('_', '-')}", type=float, default=default, help="wall-clock time of this stage")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # Denormal numbers, of which a decayed optimizer state has many, are a hundred times slower on a CPU.
    torch.set_flush_denormal(True)
    return options
