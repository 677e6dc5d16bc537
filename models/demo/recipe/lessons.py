"""Lessons for the draft: texts, and the target's final hidden state at each of their tokens.

The hidden states are kept in place of the target's distributions, which its head makes from them exactly. The
target thus reads or writes every text once, however often the draft studies it.
"""

import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from models.demo.recipe.batches import Windows
from models.demo.recipe.sampling import continue_text, read_states
from models.demo.recipe.timebox import TimeBox

READ_LENGTH = 256
WRITTEN_LENGTH = 224
ROWS = 160
TEMPERATURES = (0.8, 0.0, 0.8, 1.0)
PROMPT_LENGTHS = (24, 48, 80)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lessons:
    """Rows of equally long texts: tokens [rows, length], hidden [rows, length, width] in fp16."""

    tokens: Tensor
    hidden: Tensor

    @property
    def token_count(self) -> int:
        """Tokens in all rows."""
        return self.tokens.numel()

    def batches(self, rows: int, generator: torch.Generator) -> Iterator["Lessons"]:
        """All rows once, shuffled, in batches."""
        for chosen in torch.split(torch.randperm(len(self.tokens), generator=generator), rows):
            yield Lessons(self.tokens[chosen], self.hidden[chosen])


@torch.no_grad()
def read_corpus_lessons(target: LlamaForCausalLM, stream: Tensor, minutes: float, seed: int) -> Lessons:
    """Lessons on the corpus: the target reads windows of it until the time is up."""
    windows, box = Windows(stream, seed), TimeBox(minutes)
    parts: list[Lessons] = []
    while not parts or not box.is_over:
        tokens = windows.next_batch(16, READ_LENGTH)[:, :-1]
        parts.append(Lessons(tokens, read_states(target, tokens, torch.ones_like(tokens)).half()))
    return _joined(parts)


def write_lessons(
    target: LlamaForCausalLM,
    functions: Sequence[Sequence[int]],
    minutes: float,
    seed: int,
    rows: int = ROWS,
) -> list[Lessons]:
    """Lessons on the target's own text, begun by the first tokens of functions; one group per length."""
    chooser, box = random.Random(seed), TimeBox(minutes)
    parts: dict[int, list[Lessons]] = {length: [] for length in PROMPT_LENGTHS}
    count = 0
    while count < len(PROMPT_LENGTHS) or not box.is_over:
        length = PROMPT_LENGTHS[count % len(PROMPT_LENGTHS)]
        temperature = TEMPERATURES[count % len(TEMPERATURES)]
        beginnings = [tokens[:length] for tokens in functions if len(tokens) >= length]
        prompts = chooser.sample(beginnings, min(rows, len(beginnings)))
        written = continue_text(target, prompts, WRITTEN_LENGTH, temperature, seed + count)
        parts[length].append(Lessons(written.tokens[:, :-1], written.hidden.half()))
        count += 1
    lessons = [_joined(group) for group in parts.values()]
    logger.info("the target wrote %d tokens of lessons", sum(group.token_count for group in lessons))
    return lessons


def _joined(parts: Sequence[Lessons]) -> Lessons:
    return Lessons(torch.cat([part.tokens for part in parts]), torch.cat([part.hidden for part in parts]))
