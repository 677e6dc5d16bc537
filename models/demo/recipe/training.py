"""Training that ends on the clock: optimizers, pretraining of the target, lessons and distillation for the draft."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM

from models.demo.recipe.architecture import Texts, continue_text, packed, read_states, windows
from models.demo.recipe.corpus import functions, load_tokenizer, read_corpus

SAVE_MINUTES = 3.0
REPORT_MINUTES = 0.5

# What follows was tuned by trials of some minutes each, by held-out loss or by divergence from the target.
TOKENS_PER_BATCH = 4096
MATRIX_LR = 0.015
OTHER_LR = 3e-3
TEMPERATURES = (0.8, 0.0, 0.8, 1.0)
PROMPT_LENGTHS = (24, 48, 80)
DRAFT_MATRIX_LR = 0.02
DRAFT_OTHER_LR = 4e-3
TOTAL_VARIATION_FROM = 0.6
"""Share of the time after which total variation takes over from KL."""

logger = logging.getLogger(__name__)


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


Loss = Callable[[Tensor, Tensor], Tensor]
"""A loss of the target's logits and the draft's."""


def decayed(fraction: float, warm_up: float = 0.02, floor: float = 0.01) -> float:
    """The learning rate's factor: a short linear rise, then a straight line down to nearly nothing."""
    if fraction < warm_up:
        return max(floor, fraction / warm_up)
    return floor + (1 - floor) * (1 - fraction) / (1 - warm_up)


def optimizers_of(model: nn.Module, matrix_lr: float, other_lr: float) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the layers' matrices, AdamW for the rest; `peak` of each group is its rate."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_inner = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        (matrices if is_inner else others).append(parameter)
    groups = [{"params": matrices, "peak": matrix_lr}], [{"params": others, "peak": other_lr}]
    return [
        torch.optim.Muon(groups[0], weight_decay=0.0, ns_steps=4),
        torch.optim.AdamW(groups[1], betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train_until_over(
    model: nn.Module,
    next_loss: Callable[[float], tuple[Tensor, int]],
    minutes: float,
    matrix_lr: float,
    other_lr: float,
    save: Callable[[], None] = lambda: None,
) -> int:
    """Train what requires gradients until the time is up; returns the tokens seen. `next_loss` makes of the share of
    the time that is used the loss of the next batch, and its tokens; `save` is called now and then."""
    optimizers = optimizers_of(model, matrix_lr, other_lr)
    box = TimeBox(minutes)
    report = TimeBox(REPORT_MINUTES)
    saving = TimeBox(SAVE_MINUTES)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    seen = 0
    model.train()
    while (fraction := box.fraction) < 1.0:
        loss, count = next_loss(fraction)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * decayed(fraction)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen += count
        if report.fraction >= 1.0:
            logger.info("%.3f of the time, %d tokens, loss %.4f", fraction, seen, loss.item())
            report = TimeBox(REPORT_MINUTES)
        if saving.fraction >= 1.0:
            save()
            saving = TimeBox(SAVE_MINUTES)
    model.train(False)
    return seen


def pretrain(
    model: LlamaForCausalLM, stream: Tensor, minutes: float, seed: int = 1, rate: float = 1.0
) -> int:
    """Train in place for the given time, with `rate` times the usual learning rates; returns the tokens seen."""
    generator = torch.Generator().manual_seed(seed)
    # Short windows while most is learned, long ones at the end so that all positions work.
    phases = {0.92: 1024, 0.8: 512, 0.0: 256}
    streams = {start: windows(stream, length, generator) for start, length in phases.items()}

    def next_loss(fraction: float) -> tuple[Tensor, int]:
        phase = next(start for start in phases if fraction >= start)
        batch = torch.stack([*islice(streams[phase], TOKENS_PER_BATCH // phases[phase])])
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()), TOKENS_PER_BATCH

    return train_until_over(model, next_loss, minutes, rate * MATRIX_LR, rate * OTHER_LR)


def endless(groups: Sequence[Texts], rows: int, generator: torch.Generator) -> Iterator[Texts]:
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


def own_texts(
    target: LlamaForCausalLM, folder: Path, minutes: float, least: int, rows: int, seed: int
) -> Iterator[tuple[int, Texts]]:
    """Texts of the target after the first tokens of training functions: their number, and as many texts as `rows`.

    It ends when the time is up, but not before there are `least` of them.
    """
    sources = [function.source for function in functions(read_corpus())]
    ids = load_tokenizer(folder)(sources, verbose=False)["input_ids"]
    chooser = random.Random(seed)
    box = TimeBox(minutes)
    for count, (length, temperature) in enumerate(zip(cycle(PROMPT_LENGTHS), cycle(TEMPERATURES))):
        if count >= least and box.fraction >= 1.0:
            return
        beginnings = [tokens[:length] for tokens in ids if len(tokens) >= length]
        prompts = chooser.sample(beginnings, min(rows, len(beginnings)))
        yield length, continue_text(target, prompts, 224, temperature, seed + count)


@torch.no_grad()
def lessons_of(
    target: LlamaForCausalLM, folder: Path, reading: float, writing: float, seed: int
) -> list[Texts]:
    """All lessons: windows of the corpus that the target reads for some minutes, then the target's own text for others,
    begun by the first tokens of functions; a group for each length."""
    stream = packed(read_corpus(), load_tokenizer(folder))
    box = TimeBox(reading)
    corpus = windows(stream, 256, torch.Generator().manual_seed(seed))
    groups: dict[int, list[Texts]] = {length: [] for length in (0, *PROMPT_LENGTHS)}
    while not groups[0] or box.fraction < 1.0:
        tokens = torch.stack([*islice(corpus, 16)])[:, :-1]
        groups[0].append(Texts(tokens, read_states(target, tokens, torch.ones_like(tokens)).half()))
    for length, written in own_texts(target, folder, writing, len(PROMPT_LENGTHS), 160, seed):
        groups[length].append(Texts(written.tokens[:, :-1], written.hidden.half()))
    lessons = [
        Texts(torch.cat([part.tokens for part in parts]), torch.cat([part.hidden for part in parts]))
        for parts in groups.values()
    ]
    logger.info("%d tokens of lessons", sum(each.tokens.numel() for each in lessons))
    return lessons


@torch.no_grad()
def adopt_embedding(draft: LlamaForCausalLM, target: LlamaForCausalLM) -> None:
    """Start the draft's embedding, which is also its head, as the target's seen in its main directions.

    Measured on a trial target: the same divergence after about half the steps that random weights need.
    """
    directions, strengths, _ = torch.linalg.svd(target.model.embed_tokens.weight, full_matrices=False)
    width = draft.config.hidden_size
    draft.model.embed_tokens.weight.copy_(directions[:, :width] * strengths[:width])


def distil(
    draft: LlamaForCausalLM, target_head: nn.Module, lessons: Sequence[Texts], minutes: float, seed: int = 1
) -> int:
    """Train the draft in place until the time is up; returns the tokens seen.

    It first learns from all lessons, and in the last phase from the target's own text alone: all but the first.
    """
    generator = torch.Generator().manual_seed(seed)
    broad, own_text = (endless(groups, 10, generator) for groups in (lessons, lessons[1:]))

    def next_loss(fraction: float) -> tuple[Tensor, int]:
        batch = next(own_text if fraction >= TOTAL_VARIATION_FROM else broad)
        with torch.no_grad():
            target_logits = target_head(batch.hidden.float())
        draft_logits = draft(input_ids=batch.tokens, use_cache=False).logits
        return divergence(fraction)(target_logits, draft_logits), batch.tokens.numel()

    return train_until_over(draft, next_loss, minutes, DRAFT_MATRIX_LR, DRAFT_OTHER_LR)


def divergence(fraction: float, last_phase: float = TOTAL_VARIATION_FROM) -> Loss:
    """The loss at a share of the time: KL at first, then the probability that a drafted token is rejected."""
    return mixed_total_variation if fraction >= last_phase else kl_divergence


def kl_divergence(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """KL(target || draft) in nats per token."""
    target_log_probs = target_logits.flatten(0, -2).log_softmax(dim=-1)
    draft_log_probs = draft_logits.flatten(0, -2).log_softmax(dim=-1)
    return functional.kl_div(draft_log_probs, target_log_probs, reduction="batchmean", log_target=True)


def mixed_total_variation(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Mean probability that a drafted token is rejected when sampling (0.8) and, by a low temperature that has
    gradients, when decoding greedily (0.3)."""
    variations = []
    for temperature in (0.8, 0.3):
        target_probs, draft_probs = (
            (each / temperature).softmax(-1) for each in (target_logits, draft_logits)
        )
        variations.append((target_probs - draft_probs).abs().sum(dim=-1).mean() / 2)
    return torch.stack(variations).mean()
