"""Pretraining of the target: next-token prediction on the corpus until the time is up."""

import logging
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM

from models.demo.recipe.batches import Windows
from models.demo.recipe.optimizer import Optimizers
from models.demo.recipe.timebox import Every, TimeBox, decayed

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
