"""Training that ends on the clock: optimizers, pretraining of the target, lessons and distillation for the draft."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM

from models.demo.recipe.architecture import Windows, continue_text, packed, read_states
from models.demo.recipe.corpus import functions, load_tokenizer, read_corpus


@dataclass
class TimeBox:
    """A stretch of wall-clock time."""

    minutes: float
    _started: float = field(default_factory=time.monotonic)

    @property
    def fraction(self) -> float:
        """The share of the time that is used, from 0 to 1."""
        spent = time.monotonic() - self._started
        return min(1.0, spent / (60 * self.minutes)) if self.minutes > 0 else 1.0

    @property
    def is_over(self) -> bool:
        """True if the time is used up."""
        return self.fraction >= 1.0


class Every:
    """Reports when an interval has passed since its last report."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = time.monotonic()

    def is_due(self) -> bool:
        """True if the time has passed; if so, it starts again."""
        if time.monotonic() - self._last < self._seconds:
            return False
        self._last = time.monotonic()
        return True


def decayed(fraction: float, warm_up: float = 0.02, floor: float = 0.01) -> float:
    """The learning rate's factor: a short linear rise, then a straight line down to nearly nothing."""
    if fraction < warm_up:
        return max(floor, fraction / warm_up)
    return floor + (1 - floor) * (1 - fraction) / (1 - warm_up)


class Optimizers:
    """Both optimizers of one model behind one `step`: Muon (Jordan et al. 2024) for the layers' matrices, AdamW."""

    def __init__(self, model: nn.Module, matrix_lr: float, other_lr: float) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            is_inner = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
            (matrices if is_inner else others).append(parameter)
        self._parts: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(matrices, lr=matrix_lr, weight_decay=0.0, ns_steps=4), matrix_lr),
            (torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.95), weight_decay=0.0), other_lr),
        ]

    def step(self, factor: float) -> None:
        """Update the model with the learning rates scaled by `factor`, and clear the gradients."""
        for optimizer, peak in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


TOKENS_PER_BATCH = 4096
MATRIX_LR = 0.015
OTHER_LR = 3e-3
SAVE_SECONDS = 180
REPORT_SECONDS = 20

logger = logging.getLogger(__name__)


def window_length(fraction: float) -> int:
    """Short windows while most is learned, long ones at the end so that all positions work."""
    if fraction < 0.8:
        return 256
    return 512 if fraction < 0.92 else 1024


def pretrain(model: LlamaForCausalLM, stream: Tensor, minutes: float, seed: int = 1) -> int:
    """Train in place for the given time; returns the tokens seen."""
    windows = Windows(stream, seed)

    def next_loss(fraction: float) -> tuple[Tensor, int]:
        length = window_length(fraction)
        batch = windows.next_batch(TOKENS_PER_BATCH // length, length)
        return next_token_loss(model, batch), TOKENS_PER_BATCH

    return train_until_over(model, next_loss, minutes, MATRIX_LR, OTHER_LR)


def next_token_loss(model: LlamaForCausalLM, batch: Tensor) -> Tensor:
    """Mean cross-entropy of each token given those before it."""
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


READ_LENGTH = 256
WRITTEN_LENGTH = 224
ROWS = 160
TEMPERATURES = (0.8, 0.0, 0.8, 1.0)
PROMPT_LENGTHS = (24, 48, 80)


@dataclass(frozen=True)
class Lessons:
    """Rows of equally long texts with what the target computed: all of it in fp16, except where it was read from files.

    Its output layer makes the exact logits of `hidden`, in a sixth of their memory.
    """

    tokens: Tensor
    """[rows, length]"""
    hidden: Tensor
    """The target's final states, [rows, length, width]."""
    read: Tensor | None = None
    """States that a drafting head reads, [layers, rows, length, width]."""

    @property
    def token_count(self) -> int:
        """Tokens in all rows."""
        return self.tokens.numel()

    def batches(self, rows: int, generator: torch.Generator) -> Iterator[Self]:
        """All rows once, shuffled, in batches."""
        for chosen in torch.split(torch.randperm(len(self.tokens), generator=generator), rows):
            read = None if self.read is None else self.read[:, chosen]
            yield type(self)(self.tokens[chosen], self.hidden[chosen], read)


def endless(groups: Sequence[Lessons], rows: int, generator: torch.Generator) -> Iterator[Lessons]:
    """Batches for ever; each pass takes every batch of every group once, in a new order."""
    while True:
        passes = [group.batches(rows, generator) for group in groups]
        while passes:
            # A group is drawn at random, so long and short groups end at different times but all are used up.
            index = int(torch.randint(len(passes), (1,), generator=generator))
            batch = next(passes[index], None)
            if batch is None:
                del passes[index]
            else:
                yield batch


def train_until_over(
    model: nn.Module,
    next_loss: Callable[[float], tuple[Tensor, int]],
    minutes: float,
    matrix_lr: float,
    other_lr: float,
    save: Callable[[], None] = lambda: None,
) -> int:
    """Train in place until the time is up; returns the tokens seen.

    Args:
        model: Its parameters that require gradients are trained.
        next_loss: From the share of the time that is used to the loss of the next batch, and its tokens.
        minutes: How long.
        matrix_lr: Peak learning rate of the matrices of the layers.
        other_lr: That of everything else.
        save: Called now and then.
    """
    optimizers, box = Optimizers(model, matrix_lr, other_lr), TimeBox(minutes)
    report, saving = Every(REPORT_SECONDS), Every(SAVE_SECONDS)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    seen = 0
    model.train()
    while not box.is_over:
        loss, count = next_loss(box.fraction)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizers.step(decayed(box.fraction))
        seen += count
        if report.is_due():
            logger.info("%.3f of the time, %d tokens, loss %.4f", box.fraction, seen, loss.item())
        if saving.is_due():
            save()
    model.train(False)
    return seen


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


def lessons_of(
    target: LlamaForCausalLM, folder: Path, reading: float, writing: float, seed: int, rows: int = ROWS
) -> list[Lessons]:
    """All lessons for a head: on the corpus for some minutes, then on the target's own text for others."""
    tokenizer, corpus = load_tokenizer(folder), read_corpus()
    sources = [function.source for function in functions(corpus.training)]
    beginnings = tokenizer(sources, verbose=False)["input_ids"]
    read = read_corpus_lessons(target, packed(corpus.training, tokenizer), reading, seed)
    return [read, *write_lessons(target, beginnings, writing, seed, rows)]


def _joined(parts: Sequence[Lessons]) -> Lessons:
    return Lessons(torch.cat([part.tokens for part in parts]), torch.cat([part.hidden for part in parts]))


ROWS_PER_BATCH = 10
DRAFT_MATRIX_LR = 0.02
DRAFT_OTHER_LR = 4e-3
TOTAL_VARIATION_FROM = 0.6
"""Share of the time after which total variation takes over from KL."""


@torch.no_grad()
def adopt_embedding(draft: LlamaForCausalLM, target: LlamaForCausalLM) -> None:
    """Start the draft's embedding, which is also its head, as the target's seen in its main directions.

    Measured on a trial target: the same divergence after about half the steps that random weights need.
    """
    directions, strengths, _ = torch.linalg.svd(target.model.embed_tokens.weight, full_matrices=False)
    width = draft.config.hidden_size
    draft.model.embed_tokens.weight.copy_(directions[:, :width] * strengths[:width])


def distil(
    draft: LlamaForCausalLM,
    target_head: nn.Module,
    read: Lessons,
    written: Sequence[Lessons],
    minutes: float,
    seed: int = 1,
) -> int:
    """Train the draft in place until the time is up; returns the tokens seen.

    It first learns from all lessons, and in the last phase from the target's own text alone.
    """
    generator = torch.Generator().manual_seed(seed)
    broad, own_text = (endless(groups, ROWS_PER_BATCH, generator) for groups in ([read, *written], written))

    def next_loss(fraction: float) -> tuple[Tensor, int]:
        batch = next(own_text if fraction >= TOTAL_VARIATION_FROM else broad)
        with torch.no_grad():
            target_logits = target_head(batch.hidden.float())
        draft_logits = draft(input_ids=batch.tokens, use_cache=False).logits
        return divergence(fraction)(target_logits, draft_logits), batch.token_count

    return train_until_over(draft, next_loss, minutes, DRAFT_MATRIX_LR, DRAFT_OTHER_LR)


def divergence(
    fraction: float, last_phase: float = TOTAL_VARIATION_FROM
) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss at a share of the time: KL at first, then the probability that a drafted token is rejected."""
    return mixed_total_variation if fraction >= last_phase else kl_divergence


def kl_divergence(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """KL(target || draft) in nats per token."""
    target_log_probs = target_logits.flatten(0, -2).log_softmax(dim=-1)
    draft_log_probs = draft_logits.flatten(0, -2).log_softmax(dim=-1)
    return functional.kl_div(draft_log_probs, target_log_probs, reduction="batchmean", log_target=True)


def total_variation(target_logits: Tensor, draft_logits: Tensor, temperature: float) -> Tensor:
    """The mean probability that a drafted token is rejected at this temperature."""
    target_probs = (target_logits / temperature).softmax(dim=-1)
    draft_probs = (draft_logits / temperature).softmax(dim=-1)
    return (target_probs - draft_probs).abs().sum(dim=-1).mean() / 2


def mixed_total_variation(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Rejections when sampling and, by a low temperature that has gradients, when decoding greedily."""
    warm = total_variation(target_logits, draft_logits, temperature=0.8)
    cold = total_variation(target_logits, draft_logits, temperature=0.3)
    return (warm + cold) / 2
