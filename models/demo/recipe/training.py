"""Training that ends on the clock: optimizers, pretraining of the target, lessons and distillation for the draft."""

from __future__ import annotations

import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM

from models.demo.recipe.architecture import Windows, continue_text, packed, read_states
from models.demo.recipe.corpus import functions, load_tokenizer, read_corpus


@dataclass
class TimeBox:
    """A stretch of wall-clock time; `already_spent_seconds` is what a resumed run used before."""

    minutes: float
    already_spent_seconds: float = 0.0
    _started: float = field(default_factory=time.monotonic)

    @property
    def spent_seconds(self) -> float:
        """Seconds used, those of earlier runs included."""
        return self.already_spent_seconds + time.monotonic() - self._started

    @property
    def fraction(self) -> float:
        """The share of the time that is used, from 0 to 1."""
        return min(1.0, self.spent_seconds / (60 * self.minutes)) if self.minutes > 0 else 1.0

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


# Jordan et al. 2024, "Muon": a quintic whose iteration drives every singular value towards one.
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 4


class BatchedMuon(torch.optim.Optimizer):
    """Momentum whose update is replaced by the nearest orthogonal matrix (Jordan et al. 2024)."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Apply one update; a closure is not supported."""
        if closure is not None:
            raise ValueError("BatchedMuon takes no closure")
        for group in self.param_groups:
            for matrices in _by_shape(group["params"]).values():
                self._update(matrices, group["lr"], group["momentum"])

    def _update(self, matrices: list[nn.Parameter], lr: float, momentum: float) -> None:
        updates = torch.stack([self._momentum_update(matrix, momentum) for matrix in matrices])
        rows, columns = updates.shape[-2:]
        # A tall matrix gets the larger step that keeps the change of its output as large as a square one's.
        step_size = lr * max(1.0, rows / columns) ** 0.5
        for matrix, update in zip(matrices, orthogonalised(updates), strict=True):
            matrix.add_(update, alpha=-step_size)

    def _momentum_update(self, matrix: nn.Parameter, momentum: float) -> Tensor:
        assert matrix.grad is not None
        average = self.state[matrix].setdefault("average", torch.zeros_like(matrix))
        average.lerp_(matrix.grad, 1 - momentum)
        return matrix.grad.lerp(average, momentum)


def orthogonalised(matrices: Tensor) -> Tensor:
    """Each matrix of a [batch, rows, columns] stack with its singular values pushed to about one."""
    linear, cubic, quintic = NEWTON_SCHULZ_COEFFICIENTS
    is_tall = matrices.size(-2) > matrices.size(-1)
    wide = matrices.mT if is_tall else matrices
    wide = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = wide @ wide.mT
        wide = torch.baddbmm(
            wide, torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic), wide, beta=linear
        )
    return wide.mT if is_tall else wide


class Optimizers:
    """Both optimizers of one model behind one `step`."""

    def __init__(self, model: nn.Module, matrix_lr: float, other_lr: float) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            is_inner = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
            (matrices if is_inner else others).append(parameter)
        self._parts: list[tuple[torch.optim.Optimizer, float]] = [
            (BatchedMuon(matrices, lr=matrix_lr), matrix_lr),
            (torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.95), weight_decay=0.0), other_lr),
        ]

    def step(self, factor: float) -> None:
        """Update the model with the learning rates scaled by `factor`, and clear the gradients."""
        for optimizer, peak in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, object]]:
        """State saved in a checkpoint."""
        return [optimizer.state_dict() for optimizer, _ in self._parts]

    def load_state_dict(self, states: list[dict[str, object]]) -> None:
        """Take up where a checkpoint left off."""
        for (optimizer, _), state in zip(self._parts, states, strict=True):
            optimizer.load_state_dict(state)


def _by_shape(matrices: list[nn.Parameter]) -> dict[torch.Size, list[nn.Parameter]]:
    groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
    for matrix in matrices:
        groups[matrix.shape].append(matrix)
    return groups


TOKENS_PER_BATCH = 4096
MATRIX_LR = 0.015
OTHER_LR = 3e-3
CHECKPOINT_SECONDS = 120
REPORT_SECONDS = 20

logger = logging.getLogger(__name__)


def window_length(fraction: float) -> int:
    """Short windows while most is learned, long ones at the end so that all positions work."""
    if fraction < 0.8:
        return 256
    return 512 if fraction < 0.92 else 1024


def pretrain(model: LlamaForCausalLM, stream: Tensor, minutes: float, checkpoint: Path, seed: int = 1) -> int:
    """Train in place for the given time, resuming from `checkpoint` if it exists; returns the tokens seen."""
    optimizers = Optimizers(model, MATRIX_LR, OTHER_LR)
    tokens_seen, spent = _resume(model, optimizers, checkpoint)
    box = TimeBox(minutes, spent)
    windows = Windows(stream, seed + tokens_seen)
    report, save = Every(REPORT_SECONDS), Every(CHECKPOINT_SECONDS)
    model.train()
    while not box.is_over:
        length = window_length(box.fraction)
        batch = windows.next_batch(TOKENS_PER_BATCH // length, length)
        loss = next_token_loss(model, batch)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step(decayed(box.fraction))
        tokens_seen += TOKENS_PER_BATCH
        if report.is_due():
            logger.info("%.3f of the time, %d tokens, loss %.3f", box.fraction, tokens_seen, loss.item())
        if save.is_due():
            _save(model, optimizers, tokens_seen, box.spent_seconds, checkpoint)
    _save(model, optimizers, tokens_seen, box.spent_seconds, checkpoint)
    model.train(False)
    return tokens_seen


def next_token_loss(model: LlamaForCausalLM, batch: Tensor) -> Tensor:
    """Mean cross-entropy of each token given those before it."""
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def _save(
    model: LlamaForCausalLM, optimizers: Optimizers, tokens_seen: int, spent: float, path: Path
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    state = {
        "model": model.state_dict(),
        "optimizers": optimizers.state_dict(),
        "tokens_seen": tokens_seen,
        "spent_seconds": spent,
    }
    torch.save(state, unfinished)
    unfinished.rename(path)


def _resume(model: LlamaForCausalLM, optimizers: Optimizers, path: Path) -> tuple[int, float]:
    if not path.exists():
        return 0, 0.0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizers.load_state_dict(state["optimizers"])
    logger.info("resuming at %d tokens", state["tokens_seen"])
    return int(state["tokens_seen"]), float(state["spent_seconds"])


READ_LENGTH = 256
WRITTEN_LENGTH = 224
ROWS = 160
TEMPERATURES = (0.8, 0.0, 0.8, 1.0)
PROMPT_LENGTHS = (24, 48, 80)


class Batched(Protocol):
    """Lessons that can be studied in batches."""

    def batches(self, rows: int, generator: torch.Generator) -> Iterator[Self]:
        """All rows once, shuffled, in batches."""


BatchedT = TypeVar("BatchedT", bound=Batched)


def endless(groups: Sequence[BatchedT], rows: int, generator: torch.Generator) -> Iterator[BatchedT]:
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
) -> int:
    """Train in place until the time is up; returns the tokens seen.

    Args:
        model: Its parameters that require gradients are trained.
        next_loss: From the share of the time that is used to the loss of the next batch, and its tokens.
        minutes: How long.
        matrix_lr: Peak learning rate of the matrices of the layers.
        other_lr: That of everything else.
    """
    optimizers, box, report = Optimizers(model, matrix_lr, other_lr), TimeBox(minutes), Every(REPORT_SECONDS)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    seen = 0
    while not box.is_over:
        loss, count = next_loss(box.fraction)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizers.step(decayed(box.fraction))
        seen += count
        if report.is_due():
            logger.info("%.3f of the time, %d tokens, loss %.4f", box.fraction, seen, loss.item())
    return seen


@dataclass(frozen=True)
class Lessons:
    """Rows of equally long texts: tokens [rows, length], hidden [rows, length, width] in fp16."""

    tokens: Tensor
    hidden: Tensor

    @property
    def token_count(self) -> int:
        """Tokens in all rows."""
        return self.tokens.numel()

    def batches(self, rows: int, generator: torch.Generator) -> Iterator[Self]:
        """All rows once, shuffled, in batches."""
        for chosen in torch.split(torch.randperm(len(self.tokens), generator=generator), rows):
            yield type(self)(self.tokens[chosen], self.hidden[chosen])


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
# The share of the time after which total variation takes over from KL.
TOTAL_VARIATION_FROM = 0.6


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
        is_last_phase = fraction >= TOTAL_VARIATION_FROM
        batch = next(own_text if is_last_phase else broad)
        with torch.no_grad():
            target_logits = target_head(batch.hidden.float())
        draft_logits = draft(input_ids=batch.tokens, use_cache=False).logits
        compare = mixed_total_variation if is_last_phase else kl_divergence
        return compare(target_logits, draft_logits), batch.token_count

    draft.train()
    tokens_seen = train_until_over(draft, next_loss, minutes, DRAFT_MATRIX_LR, DRAFT_OTHER_LR)
    draft.train(False)
    return tokens_seen


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
