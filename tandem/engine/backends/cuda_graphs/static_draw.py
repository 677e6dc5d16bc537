"""The draw after each step of a captured proposal, by parameters that are numbers on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.sampling.noise import sample

_TEMPERATURE, _TOP_P, _MIN_P, _TOP_K, COUNT, FIRST_KEY = range(6)
"""Rows of the parameters. `COUNT` is the number of tokens; a key for each of them follows."""


def draw(logits: Tensor, parameters: Tensor, step: int, count: int) -> tuple[Tensor, Tensor]:
    """Draw a token for each row.

    Args:
        logits: [sequences, vocabulary_size].
        parameters: int64 [FIRST_KEY + steps, sequences].
        step: the draw's place in the proposal.
        count: tokens of a distribution.

    Returns:
        int64 [sequences] ids; int32 [sequences, 2 + 2 * count]: the id, its logit's bits, the ids of its distribution,
        and their probabilities' bits.
    """
    temperature = parameters[_TEMPERATURE].view(torch.float64)
    top_logits, columns = logits.topk(count, dim=-1)
    probs = _warped(top_logits, parameters).float()
    winners = sample(probs.double(), parameters[FIRST_KEY + step], columns)
    sampled = columns.gather(1, winners[:, None])[:, 0]
    token_ids = torch.where(temperature > 0.0, sampled, logits.argmax(dim=-1))
    token_logits = logits.gather(1, token_ids[:, None]).float()
    parts = (
        token_ids[:, None].int(),
        token_logits.view(torch.int32),
        columns.int(),
        probs.view(torch.int32),
    )
    return token_ids, torch.cat(parts, dim=1)


def _warped(top_logits: Tensor, parameters: Tensor) -> Tensor:
    """Temperature, min-p, top-k and top-p of each row's highest logits, as `tandem.sampling.warping.warp` defines them.

    The parameters are numbers on the device, so a captured graph cannot skip a step that they make unnecessary.

    Args:
        top_logits: [R, M], descending.
        parameters: int64 [4 or more, R].

    Returns:
        float64 [R, M]; each row sums to one. A row of temperature 0 is warped as if by 1.
    """
    temperature, top_p, min_p = parameters[:_TOP_K].view(torch.float64)[:, :, None]
    scores = top_logits.double() / torch.where(temperature > 0.0, temperature, 1.0)
    weights = torch.exp(scores - scores[:, :1])
    weights = torch.where(weights >= min_p, weights, 0.0)
    size = weights.shape[1]
    last = torch.where(parameters[_TOP_K] > 0, parameters[_TOP_K], size).clamp(1, size) - 1
    weights = torch.where(weights < weights.gather(1, last[:, None]), 0.0, weights)
    probs = weights / weights.sum(dim=1, keepdim=True)
    from_the_end = probs.flip(1).cumsum(1).flip(1)
    is_nucleus = (from_the_end > 1.0 - top_p) | (top_p >= 1.0)
    is_nucleus[:, 0] = True
    weights = torch.where(is_nucleus, weights, 0.0)
    return weights / weights.sum(dim=1, keepdim=True)
