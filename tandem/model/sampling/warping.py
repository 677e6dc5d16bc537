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
from array_api_compat import device, is_torch_array

from tandem.model.sampling.noise import namespace_of
from tandem.model.types import FloatArray, SamplingParams

Array: TypeAlias = Any
"""A numpy array or a torch tensor, used almost only through the array API standard."""

_PLAIN = SamplingParams()
"""Leaves every distribution unchanged."""


def parameter_rows(sampling: Sequence[SamplingParams]) -> FloatArray:
    """Return the parameters as `warp` takes them from the device of the logits, float64 [5, R]: temperature, min-p,
    top-k, top-p, and 1 for a greedy row, which has the parameters that change nothing."""
    others = [_PLAIN if params.is_greedy else params for params in sampling]
    columns = [
        (each.temperature, each.min_p, each.top_k, each.top_p, float(params.is_greedy))
        for each, params in zip(others, sampling, strict=True)
    ]
    return np.array(columns, dtype=np.float64).T


def warp(logits: Array, sampling: Sequence[SamplingParams], columns: Array | None = None) -> Array:
    """Return the probabilities to sample from: the logits, warped by the sampling parameters.

    The steps to run follow from `sampling` on the host alone, and the vocabulary is sorted only when a row has top_k
    or top_p. With `columns` the host never waits for the device.

    Args:
        logits: [R, V], a floating type. A row has at least one finite entry; -inf entries stay impossible.
        sampling: One for each row.
        columns: Their `parameter_rows` on the device of `logits`; None copies those that rows do not share.

    Returns:
        float64 [R, V] on the device of `logits`; each row sums to one. A row of temperature 0 is one-hot at
        its argmax, the lowest id among equals.
    """
    if all(params.is_greedy for params in sampling):
        return _one_hot_argmax(logits)
    xp = namespace_of(logits)
    # Greedy rows are replaced at the end; until then they are treated as unwarped rows, which is the cheapest.
    others = [_PLAIN if params.is_greedy else params for params in sampling]
    if columns is None:
        columns = _columns(parameter_rows(sampling), logits)
    temperature, min_p, top_k, top_p, is_greedy = (
        column if isinstance(column, float) else column[:, None] for column in columns
    )
    scores = xp.astype(logits, xp.float64) / temperature
    weights = xp.exp(scores - xp.max(scores, axis=1, keepdims=True))
    if any(params.min_p > 0.0 for params in others):
        # The maximum weight is 1, so the threshold needs no normalised probabilities.
        weights = xp.where(weights < min_p, 0.0, weights)
    has_top_p = any(params.top_p < 1.0 for params in others)
    if has_top_p or any(params.top_k > 0 for params in others):
        # Of this many of the largest values; of all where a row has top_p alone.
        count = logits.shape[1]
        if not any(params.top_p < 1.0 and params.top_k == 0 for params in others):
            count = min(max(params.top_k for params in others), count)
        weights = _truncate_sorted(weights, top_k, top_p if has_top_p else None, count)
    probs = weights / xp.sum(weights, axis=1, keepdims=True)
    if any(params.is_greedy for params in sampling):
        probs = xp.where(is_greedy > 0.0, _one_hot_argmax(logits), probs)
    return probs


def _columns(rows: FloatArray, like: Array) -> list[Array | float]:
    """Return the rows on the device of `like`; one number when all of a row are equal."""
    xp = namespace_of(like)
    return [
        float(row[0])
        if (row == row[0]).all()
        else xp.asarray(row.tolist(), dtype=xp.float64, device=device(like))
        for row in rows
    ]


def _one_hot_argmax(logits: Array) -> Array:
    xp = namespace_of(logits)
    token_ids = xp.arange(logits.shape[1], dtype=xp.int64, device=device(logits))
    return xp.astype(token_ids == xp.argmax(logits, axis=1, keepdims=True), xp.float64)


def _truncate_sorted(
    weights: Array, top_k: Array | float, top_p: Array | float | None, candidate_count: int
) -> Array:
    """Set to zero the entries of unnormalised probabilities [R, V] that top-k and then top-p, if any, remove.

    Both look at the `candidate_count` largest values of each row.
    """
    xp = namespace_of(weights)
    ascending = _largest(weights, candidate_count)
    smallest_kept = _kth_largest(ascending, top_k)
    # Tokens that tie with the smallest kept one are kept as well.
    weights = xp.where(weights < smallest_kept, 0.0, weights)
    if top_p is None:
        return weights
    ascending = xp.where(ascending < smallest_kept, 0.0, ascending)
    return _keep_nucleus(weights, ascending, smallest_kept, top_p)


def _largest(values: Array, count: int) -> Array:
    """Return the `count` largest values of each row in ascending order, [R, count].

    Selection is many times as fast as sorting a large vocabulary, but the array API standard lacks it.
    """
    if count == values.shape[1]:
        return namespace_of(values).sort(values, axis=1)
    if is_torch_array(values):
        return values.topk(count, dim=1).values.flip(1)
    return np.sort(np.partition(values, -count, axis=1)[:, -count:], axis=1)


def _kth_largest(ascending: Array, top_k: Array | float) -> Array:
    """Return the `top_k`-th largest value of each sorted row, [R, 1]; 0 where `top_k` is 0."""
    xp = namespace_of(ascending)
    size = ascending.shape[1]
    if isinstance(top_k, float):
        column = max(size - (int(top_k) or size), 0)
        return ascending[:, column : column + 1] * float(top_k > 0.0)
    counts = xp.where(top_k > 0.0, top_k, float(size))
    indices = xp.astype(xp.clip(size - counts, min=0.0), xp.int64)
    return xp.take_along_axis(ascending, indices, axis=1) * xp.astype(top_k > 0.0, xp.float64)


def _keep_nucleus(weights: Array, ascending: Array, smallest_kept: Array, top_p: Array | float) -> Array:
    """Set to zero the least probable tokens of each row that together have at most 1 - top_p.

    Among equally probable tokens the lowest ids are dropped first, as in a stable sort. Sorted values alone
    suffice, so the permutation is never computed or inverted.

    Args:
        weights: Unnormalised probabilities after top-k, [R, V].
        ascending: The largest of them in ascending order, [R, C].
        smallest_kept: The smallest that is not zero, [R, 1], where C is less than V. Tokens that tie with it may
            be missing from `ascending`.
        top_p: [R, 1], or one number for all rows; 1 leaves a row unchanged.
    """
    xp = namespace_of(weights)
    limits = 1.0 - top_p
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
    keeps = keeps | (top_p >= 1.0)
    return xp.where(keeps, weights, 0.0)


def _count(mask: Array) -> Array:
    """Count the true entries of each row, [R, 1]."""
    return namespace_of(mask).count_nonzero(mask, axis=1, keepdims=True)
