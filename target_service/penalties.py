"""Penalties on tokens that occurred before, position by position.

Each row sees all tokens before its own position, including a proposal's tokens, as if the target had written them.
Repetition is that of transformers' `RepetitionPenaltyLogitsProcessor` (Keskar et al. 2019, arXiv 1909.05858, section
4.1), over prompt and completion. Frequency and presence are those of OpenAI's API and of vLLM, over the completion
alone. In this order, as in vLLM, and before temperature and truncation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.engine.backends.transfers import to_device
from tandem.types import SamplingParams


@dataclass(frozen=True, slots=True)
class History:
    """A sequence, as far as penalties ask for it."""

    prompt_length: int
    """How many of the first tokens are the prompt."""
    token_ids: Sequence[int] = ()
    """All tokens, the proposal's at the end. The last row is for the token after them."""


def penalized(logits: Tensor, history: History, sampling: SamplingParams) -> Tensor:
    """The logits of one sequence's rows with penalties applied.

    Args:
        logits: [R, V], any floating type; the rows of the last R positions.
        history: The sequence that they belong to.
        sampling: The penalties.

    Returns:
        float32 [R, V].
    """
    scores = logits.float()
    if sampling.repetition_penalty != 1.0:
        occurred = _counts(scores, history.token_ids, 0) > 0
        discouraged = torch.where(
            scores < 0, scores * sampling.repetition_penalty, scores / sampling.repetition_penalty
        )
        scores = torch.where(occurred, discouraged, scores)
    if sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0:
        counts = _counts(scores, history.token_ids, history.prompt_length)
        scores = scores - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    return scores


def _counts(like: Tensor, token_ids: Sequence[int], start: int) -> Tensor:
    """For each row, how often each token stands between `start` and the row's position; shape and device of `like`."""
    row_count, vocabulary_size = like.shape
    base_length = max(len(token_ids) - row_count + 1, 0)
    (before,) = to_device([np.array(token_ids[start:base_length], dtype=np.int64)], like.device)
    # `torch.bincount` would wait for the device.
    counts = like.new_zeros(vocabulary_size).index_add_(0, before, like.new_ones(len(before)))
    counts = counts.repeat(row_count, 1)
    for row, position in enumerate(range(base_length, len(token_ids)), start=1):
        if position >= start:
            counts[row:, token_ids[position]] += 1
    return counts
