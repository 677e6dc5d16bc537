"""From logits to the distribution that is sampled: temperature, top-k, top-p, min-p.

One definition for numpy and torch, in float64 throughout, so that the target's device and the coordinator
come to the same distribution. The meaning, down to ties and to the token that always stays, is that of
`TemperatureLogitsWarper`, `TopKLogitsWarper`, `TopPLogitsWarper` and `MinPLogitsWarper` of Hugging Face
transformers, applied in this order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from array_api_compat import array_namespace, device

from tandem.types import SamplingParams

Array: TypeAlias = Any
"""A numpy array or a torch tensor: only what the array API standard gives both is used of it."""


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
    temperatures = _column([params.temperature or 1.0 for params in sampling], logits)
    scores = xp.astype(logits, xp.float64) / temperatures
    weights = xp.exp(scores - xp.max(scores, axis=1, keepdims=True))
    if any(_needs_sorting(params) for params in sampling):
        weights = _truncate_sorted(weights, sampling)
    if any(params.min_p > 0.0 for params in sampling):
        # The highest weight is 1, so the threshold needs no normalised probabilities.
        weights = xp.where(weights < _column([params.min_p for params in sampling], logits), 0.0, weights)
    probs = weights / xp.sum(weights, axis=1, keepdims=True)
    if any(params.is_greedy for params in sampling):
        greedy = _column([float(params.is_greedy) for params in sampling], logits) > 0.0
        probs = xp.where(greedy, _one_hot_argmax(logits), probs)
    return probs


def _needs_sorting(params: SamplingParams) -> bool:
    return not params.is_greedy and (params.top_k > 0 or params.top_p < 1.0)


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
    ascending = xp.sort(weights, axis=1)
    if any(params.top_k > 0 for params in sampling):
        lowest_kept = _kth_highest(ascending, [params.top_k for params in sampling])
        # Everything that ties with the lowest token kept is kept as well.
        weights = xp.where(weights < lowest_kept, 0.0, weights)
        ascending = xp.where(ascending < lowest_kept, 0.0, ascending)
    if any(params.top_p < 1.0 for params in sampling):
        weights = _keep_nucleus(weights, ascending, [params.top_p for params in sampling])
    return weights


def _kth_highest(ascending: Array, top_k: Sequence[int]) -> Array:
    """The `top_k`-th highest value of each sorted row, [R, 1]; the lowest when `top_k` is 0 or too large."""
    xp = array_namespace(ascending)
    size = ascending.shape[1]
    columns = [max(size - count, 0) if count else 0 for count in top_k]
    indices = xp.asarray(columns, dtype=xp.int64, device=device(ascending))[:, None]
    return xp.take_along_axis(ascending, indices, axis=1)


def _keep_nucleus(weights: Array, ascending: Array, top_p: Sequence[float]) -> Array:
    """Sets to zero the least probable tokens of each row that together have at most 1 - top_p.

    Among equally probable tokens the lowest ids go first, as in a stable sort. Working with the sorted values
    alone spares the sort its permutation and the way back.
    """
    xp = array_namespace(weights)
    probs = ascending / xp.sum(ascending, axis=1, keepdims=True)
    # A row without top_p drops nothing: no cumulative probability is negative.
    limits = _column([1.0 - value if value < 1.0 else -1.0 for value in top_p], weights)
    dropped = xp.cumulative_sum(probs, axis=1) <= limits
    dropped_count = xp.count_nonzero(dropped, axis=1, keepdims=True)
    dropped_count = xp.minimum(dropped_count, xp.asarray(weights.shape[1] - 1, device=device(weights)))
    boundary = xp.take_along_axis(ascending, dropped_count, axis=1)
    below = xp.count_nonzero(ascending < boundary, axis=1, keepdims=True)
    at_boundary = weights == boundary
    rank_at_boundary = xp.cumulative_sum(xp.astype(at_boundary, xp.int64), axis=1)
    keeps = (weights > boundary) | (at_boundary & (rank_at_boundary > dropped_count - below))
    return xp.where(keeps, weights, 0.0)
