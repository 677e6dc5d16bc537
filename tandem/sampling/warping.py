"""Warping turns logits into the distribution to sample: temperature, min-p, top-k, top-p.

One definition for numpy and torch, in float64 throughout, so that the target's device and the coordinator
compute the same distribution. Each step, down to ties and to the token that always remains, works like
`TemperatureLogitsWarper`, `MinPLogitsWarper`, `TopKLogitsWarper` and `TopPLogitsWarper` of Hugging Face
transformers. The order is vLLM's, where min-p comes first; transformers applies it last. The two orders differ only
if min-p and top-p are combined: top-p then applies to the mass that min-p has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from array_api_compat import array_namespace, device, is_torch_array

from tandem.types import SamplingParams

Array: TypeAlias = Any
"""A numpy array or a torch tensor, used almost only through the array API standard."""

_PLAIN = SamplingParams()
"""Leaves every distribution unchanged."""


def warp(logits: Array, sampling: Sequence[SamplingParams]) -> Array:
    """Return the probabilities to sample from: the logits, warped by the sampling parameters.

    The steps to run follow from `sampling` on the host alone: the host never waits for the device, and the
    vocabulary is sorted only when a row has top_k or top_p.

    Args:
        logits: [R, V], a floating type. A row has at least one finite entry; -inf entries stay impossible.
        sampling: One for each row.

    Returns:
        float64 [R, V] on the device of `logits`; each row sums to one. A row of temperature 0 is one-hot at
        its argmax, the lowest id among equals.
    """
    xp = array_namespace(logits)
    if all(params.is_greedy for params in sampling):
        return _one_hot_argmax(logits)
    # Greedy rows are replaced at the end; until then they are treated as unwarped rows, which is the cheapest.
    others = [_PLAIN if params.is_greedy else params for params in sampling]
    scores = xp.astype(logits, xp.float64) / _column([params.temperature for params in others], logits)
    weights = xp.exp(scores - xp.max(scores, axis=1, keepdims=True))
    if any(params.min_p > 0.0 for params in others):
        # The maximum weight is 1, so the threshold needs no normalised probabilities.
        weights = xp.where(weights < _column([params.min_p for params in others], logits), 0.0, weights)
    if any(params.top_k > 0 or params.top_p < 1.0 for params in others):
        weights = _truncate_sorted(weights, others)
    probs = weights / xp.sum(weights, axis=1, keepdims=True)
    if any(params.is_greedy for params in sampling):
        greedy = _column([float(params.is_greedy) for params in sampling], logits) > 0.0
        probs = xp.where(greedy, _one_hot_argmax(logits), probs)
    return probs


def _column(values: Sequence[float], like: Array) -> Array:
    """Return the values as float64 [R, 1] on the device of `like`; one number when all are equal."""
    if all(value == values[0] for value in values):
        return values[0]
    xp = array_namespace(like)
    return xp.asarray(values, dtype=xp.float64, device=device(like))[:, None]


def _one_hot_argmax(logits: Array) -> Array:
    xp = array_namespace(logits)
    token_ids = xp.arange(logits.shape[1], dtype=xp.int64, device=device(logits))
    return xp.astype(token_ids == xp.argmax(logits, axis=1, keepdims=True), xp.float64)


def _truncate_sorted(weights: Array, sampling: Sequence[SamplingParams]) -> Array:
    """Set to zero the entries of unnormalised probabilities [R, V] that top-k and then top-p remove."""
    xp = array_namespace(weights)
    ascending = _largest(weights, _candidate_count(sampling, weights.shape[1]))
    smallest_kept = _kth_largest(ascending, [params.top_k for params in sampling])
    # Tokens that tie with the smallest kept one are kept as well.
    weights = xp.where(weights < smallest_kept, 0.0, weights)
    if all(params.top_p >= 1.0 for params in sampling):
        return weights
    ascending = xp.where(ascending < smallest_kept, 0.0, ascending)
    return _keep_nucleus(weights, ascending, smallest_kept, [params.top_p for params in sampling])


def _candidate_count(sampling: Sequence[SamplingParams], vocabulary_size: int) -> int:
    """Return how many of the largest values are needed: the maximum top_k, or all where a row has top_p alone."""
    if any(params.top_p < 1.0 and params.top_k == 0 for params in sampling):
        return vocabulary_size
    return min(max(params.top_k for params in sampling), vocabulary_size)


def _largest(values: Array, count: int) -> Array:
    """Return the `count` largest values of each row in ascending order, [R, count].

    Selection is many times as fast as sorting a large vocabulary, but the array API standard lacks it.
    """
    if count == values.shape[1]:
        return array_namespace(values).sort(values, axis=1)
    if is_torch_array(values):
        return values.topk(count, dim=1).values.flip(1)
    return np.sort(np.partition(values, -count, axis=1)[:, -count:], axis=1)


def _kth_largest(ascending: Array, top_k: Sequence[int]) -> Array:
    """Return the `top_k`-th largest value of each sorted row, [R, 1]; 0 where `top_k` is 0."""
    xp = array_namespace(ascending)
    size = ascending.shape[1]
    columns = [max(size - (count or size), 0) for count in top_k]
    indices = xp.asarray(columns, dtype=xp.int64, device=device(ascending))[:, None]
    keeps_some = _column([float(count > 0) for count in top_k], ascending)
    return xp.take_along_axis(ascending, indices, axis=1) * keeps_some


def _keep_nucleus(weights: Array, ascending: Array, smallest_kept: Array, top_p: Sequence[float]) -> Array:
    """Set to zero the least probable tokens of each row that together have at most 1 - top_p.

    Among equally probable tokens the lowest ids are dropped first, as in a stable sort. Sorted values alone
    suffice, so the permutation is never computed or inverted.

    Args:
        weights: Unnormalised probabilities after top-k, [R, V].
        ascending: The largest of them in ascending order, [R, C].
        smallest_kept: The smallest that is not zero, [R, 1], where C is less than V. Tokens that tie with it may
            be missing from `ascending`.
        top_p: One for each row; 1 leaves the row unchanged.
    """
    xp = array_namespace(weights)
    limits = _column([1.0 - value for value in top_p], weights)
    total = xp.sum(weights, axis=1, keepdims=True)
    missing = _count(weights == smallest_kept) - _count(ascending == smallest_kept)
    tied_prob = smallest_kept / total
    # Missing tokens are no more probable than any in `ascending`, so they are dropped first.
    cumulative = xp.cumulative_sum(ascending / total, axis=1) + xp.where(
        missing > 0, missing * tied_prob, 0.0
    )
    dropped_count = _count((ascending == 0.0) | (cumulative <= limits))
    dropped_count = xp.clip(dropped_count, max=ascending.shape[1] - 1)  # the argmax remains
    boundary = xp.take_along_axis(ascending, dropped_count, axis=1)
    missing_dropped = xp.minimum(missing, xp.floor(limits / xp.where(tied_prob > 0.0, tied_prob, 1.0)))
    at_boundary_dropped = dropped_count - _count(ascending < boundary)
    at_boundary_dropped = at_boundary_dropped + xp.where(boundary == smallest_kept, missing_dropped, 0.0)
    at_boundary = weights == boundary
    rank = xp.cumulative_sum(xp.astype(at_boundary, xp.int64), axis=1)
    keeps = (weights > boundary) | (at_boundary & (rank > at_boundary_dropped))
    keeps = keeps | (_column([float(value >= 1.0) for value in top_p], weights) > 0.0)
    return xp.where(keeps, weights, 0.0)


def _count(mask: Array) -> Array:
    """Count the true entries of each row, [R, 1]."""
    return array_namespace(mask).count_nonzero(mask, axis=1, keepdims=True)
