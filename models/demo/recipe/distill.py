"""Distillation of the draft: it learns the target's distribution, not the corpus.

What counts is the acceptance rate, which for one token is 1 - TV(target, draft) (Leviathan et al. 2023,
corollary 3.6). The KL divergence has useful gradients from the start and comes first; the total variation is
what is asked for and comes last (DistillSpec, Zhou et al. 2024, compares the two).
"""

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM

from models.demo.recipe.lessons import Lessons
from models.demo.recipe.optimizer import Optimizers
from models.demo.recipe.timebox import Every, TimeBox, decayed

ROWS_PER_BATCH = 10
MATRIX_LR = 0.02
OTHER_LR = 4e-3
# The share of the time after which total variation takes over from KL.
TOTAL_VARIATION_FROM = 0.6
REPORT_SECONDS = 20

logger = logging.getLogger(__name__)


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
    optimizers = Optimizers(draft, MATRIX_LR, OTHER_LR)
    broad, own_text = _endless([read, *written], seed), _endless(written, seed)
    box, report = TimeBox(minutes), Every(REPORT_SECONDS)
    draft.train()
    tokens_seen = 0
    while not box.is_over:
        is_last_phase = box.fraction >= TOTAL_VARIATION_FROM
        batch = next(own_text if is_last_phase else broad)
        with torch.no_grad():
            target_logits = target_head(batch.hidden.float())
        draft_logits = draft(input_ids=batch.tokens, use_cache=False).logits
        loss = (mixed_total_variation if is_last_phase else kl_divergence)(target_logits, draft_logits)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizers.step(decayed(box.fraction))
        tokens_seen += batch.token_count
        if report.is_due():
            logger.info("%.3f of the time, %d tokens, loss %.4f", box.fraction, tokens_seen, loss.item())
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


def _endless(lessons: Sequence[Lessons], seed: int) -> Iterator[Lessons]:
    """Batches for ever; each pass takes every batch of every group once, in a new order."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        passes = [group.batches(ROWS_PER_BATCH, generator) for group in lessons]
        while passes:
            # A group is drawn at random, so long and short groups end at different times but all are used up.
            index = int(torch.randint(len(passes), (1,), generator=generator))
            batch = next(passes[index], None)
            if batch is None:
                del passes[index]
            else:
                yield batch
