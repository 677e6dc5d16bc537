"""From logits to the distribution that is sampled: temperature, min-p, top-k, top-p.

One definition for numpy and torch, in float64 throughout, so that the target's device and the coordinator
come to the same distribution. The meaning of each, down to ties and to the token that always stays, is that of
`TemperatureLogitsWarper`, `MinPLogitsWarper`, `TopKLogitsWarper` and `TopPLogitsWarper` of Hugging Face
transformers. The order is vLLM's, where min-p comes first; transformers applies it last. The two orders differ only
where min-p and top-p go together: top-p's share is one of what min-p has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from array_api_compat import array_namespace, device, is_torch_array

from tandem.types import SamplingParams

Array: TypeAlias = Any
"""A numpy array or a torch tensor: hardly more is used of it than the array API standard gives both."""

_PLAIN = SamplingParams()
"""Leaves every distribution as it is."""


def warp(logits: Array, sampling: Sequence[SamplingParams]) -> Array:
    """Probabilities that the sampling parameters make of logits.

    What has to be done is read from `sampling` on the host: nothing waits for the device, and the vocabulary
    is sorted only when a row has top_k or top_p.

    Args:
        logits: [R, V], a floating type. A row has at least one finite entry; -inf entries stay impossible.
        sampling: One for each row.

    Returns:
        float64 [R, V] on the device of `logits`; each row sums to one. A row of temperature 0 is one-hot at
        its highest logit, the lowest id among equals.
    """
    xp = array_namespace(logits)
    if all(params.is_greedy for params in sampling):
        return _one_hot_argmax(logits)
    # Greedy rows are replaced at the end; until then they are rows that cost nothing.
    others = [_PLAIN if params.is_greedy else params for params in sampling]
    scores = xp.astype(logits, xp.float64) / _column([params.temperature for params in others], logits)
    weights = xp.exp(scores - xp.max(scores, axis=1, keepdims=True))
    if any(params.min_p > 0.0 for params in others):
        # The highest weight is 1, so the threshold needs no normalised probabilities.
        weights = xp.where(weights < _column([params.min_p for params in others], logits), 0.0, weights)
    if any(params.top_k > 0 or params.top_p < 1.0 for params in others):
        weights = _truncate_sorted(weights, others)
    probs = weights / xp.sum(weights, axis=1, keepdims=True)
    if any(params.is_greedy for params in sampling):
        greedy = _column([float(params.is_greedy) for params in sampling], logits) > 0.0
        probs = xp.where(greedy, _one_hot_argmax(logits), probs)
    return probs


def _column(values: Sequence[float], like: Array) -> Array:
    """The values as float64 [R, 1] on the device of `like`; one number when all are equal."""
    if all(value == values[0] for value in values):
        return values[0]
    xp = array_namespace(like)
    return xp.asarray(values, dtype=xp.float64, device=device(like))[:, None]


def _one_hot_argmax(logits: Array) -> Array:
    xp = array_namespace(logits)
    token_ids = xp.arange(logits.shape[1], dtype=xp.int64, device=device(logits))
    return xp.astype(token_ids == xp.argmax(logits, axis=1, keepdims=True), xp.float64)


def _truncate_sorted(weights: Array, sampling: Sequence[SamplingParams]) -> Array:
    """Sets to zero what top-k and then top-p leave out of unnormalised probabilities [R, V]."""
    xp = array_namespace(weights)
    ascending = _highest(weights, _candidate_count(sampling, weights.shape[1]))
    lowest_kept = _kth_highest(ascending, [params.top_k for params in sampling])
    # Everything that ties with the lowest token kept is kept as well.
    weights = xp.where(weights < lowest_kept, 0.0, weights)
    if all(params.top_p >= 1.0 for params in sampling):
        return weights
    ascending = xp.where(ascending < lowest_kept, 0.0, ascending)
    return _keep_nucleus(weights, ascending, lowest_kept, [params.top_p for params in sampling])


def _candidate_count(sampling: Sequence[SamplingParams], vocabulary_size: int) -> int:
    """How many of the highest values decide: the top_k, or all of them where a row has top_p alone."""
    if any(params.top_p < 1.0 and params.top_k == 0 for params in sampling):
        return vocabulary_size
    return min(max(params.top_k for params in sampling), vocabulary_size)


def _highest(values: Array, count: int) -> Array:
    """The `count` highest values of each row in ascending order, [R, count].

    The array API standard has no selection, which is many times as fast as sorting a large vocabulary.
    """
    if count == values.shape[1]:
        return array_namespace(values).sort(values, axis=1)
    if is_torch_array(values):
        return values.topk(count, dim=1).values.flip(1)
    return np.sort(np.partition(values, -count, axis=1)[:, -count:], axis=1)


def _kth_highest(ascending: Array, top_k: Sequence[int]) -> Array:
    """The `top_k`-th highest value of each sorted row, [R, 1]; 0 where `top_k` is 0."""
    xp = array_namespace(ascending)
    size = ascending.shape[1]
    columns = [max(size - (count or size), 0) for count in top_k]
    indices = xp.asarray(columns, dtype=xp.int64, device=device(ascending))[:, None]
    keeps_some = _column([float(count > 0) for count in top_k], ascending)
    return xp.take_along_axis(ascending, indices, axis=1) * keeps_some


def _keep_nucleus(weights: Array, ascending: Array, lowest_kept: Array, top_p: Sequence[float]) -> Array:
    """Sets to zero the least probable tokens of each row that together have at most 1 - top_p.

    Among equally probable tokens the lowest ids go first, as in a stable sort. Working with sorted values
    alone spares the sort its permutation and the way back.

    Args:
        weights: Unnormalised probabilities after top-k, [R, V].
        ascending: The highest of them in order, [R, C].
        lowest_kept: The lowest that is not zero, [R, 1], where C is less than V. Tokens that tie with it may
            be missing from `ascending`.
        top_p: For each row; 1 leaves the row as it is.
    """
    xp = array_namespace(weights)
    limits = _column([1.0 - value for value in top_p], weights)
    total = xp.sum(weights, axis=1, keepdims=True)
    missing = _count(weights == lowest_kept) - _count(ascending == lowest_kept)
    tied_prob = lowest_kept / total
    # What is missing is no more probable than what follows it in order, so it is dropped first.
    cumulative = xp.cumulative_sum(ascending / total, axis=1) + xp.where(
        missing > 0, missing * tied_prob, 0.0
    )
    dropped_count = _count((ascending == 0.0) | (cumulative <= limits))
    dropped_count = xp.clip(dropped_count, max=ascending.shape[1] - 1)  # the most probable token stays
    boundary = xp.take_along_axis(ascending, dropped_count, axis=1)
    missing_dropped = xp.minimum(missing, xp.floor(limits / xp.where(tied_prob > 0.0, tied_prob, 1.0)))
    at_boundary_dropped = dropped_count - _count(ascending < boundary)
    at_boundary_dropped = at_boundary_dropped + xp.where(boundary == lowest_kept, missing_dropped, 0.0)
    at_boundary = weights == boundary
    rank = xp.cumulative_sum(xp.astype(at_boundary, xp.int64), axis=1)
    keeps = (weights > boundary) | (at_boundary & (rank > at_boundary_dropped))
    keeps = keeps | (_column([float(value >= 1.0) for value in top_p], weights) > 0.0)
    return xp.where(keeps, weights, 0.0)


def _count(mask: Array) -> Array:
    """How many are true in each row, [R, 1]."""
    return array_namespace(mask).count_nonzero(mask, axis=1, keepdims=True)
