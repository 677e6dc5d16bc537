"""From the target's logits to the rows that coordinators ask for, for all sequences of a step at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from tandem.engine.backends.eager.sampler import TORCH_SAMPLER
from tandem.engine.backends.interface import Sampler
from tandem.sampling.noise import recovery_keys, target_keys
from tandem.types import (
    DenseRow,
    FloatArray,
    IntArray,
    RowKind,
    RowStatistics,
    SamplingParams,
    SupportRow,
    TargetRow,
    TokenRow,
    Verification,
    VerifyStep,
)
from target_service.adjustments import Adjustments
from target_service.penalties import History, penalized

_NO_SUPPORT: IntArray = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class RowRequest:
    """One sequence's work in a step."""

    step: VerifyStep
    sampling: SamplingParams
    history: History | None = None
    """Tokens of the sequence, where penalties need them."""
    adjustments: Adjustments | None = None
    """Changes that the request makes to the logits before penalties; None where it makes none."""

    @property
    def takes_logits_as_they_are(self) -> bool:
        """True if the rows are those of the model's own logits."""
        return self.history is None and self.adjustments is None

    @property
    def base_length(self) -> int:
        """Length of the sequence whose next token the first row describes."""
        return self.step.delta.length - self.step.row_count + 1

    @property
    def races_recovery(self) -> bool:
        """True if the rows' samples must use the recovery keys, with which the coordinator goes on."""
        return self.step.raced_recovery and self.step.row_kind is RowKind.SUPPORT

    @property
    def needs_only_argmax(self) -> bool:
        """True if only the highest logit of each row is needed."""
        return self.step.row_kind is RowKind.TOKEN and self.sampling.is_greedy


def verifications(
    requests: Sequence[RowRequest], logits: Tensor, sampler: Sampler = TORCH_SAMPLER
) -> list[Verification | None]:
    """The rows of each request; None for a request with logits that are not finite.

    Args:
        requests: The request of each sequence.
        logits: [rows of all requests in order, vocabulary_size], any floating type.
        sampler: Computes and draws.
    """
    rows: list[_Rows] = [()] * len(requests)
    for choose, indices in _by_way(requests).items():
        chosen = choose([requests[i] for i in indices], _logits_of(indices, requests, logits), sampler)
        for i, row in zip(indices, chosen, strict=True):
            rows[i] = row
    return [
        None if row is None else Verification(request.base_length, row)
        for request, row in zip(requests, rows, strict=True)
    ]


def _logits_of(indices: Sequence[int], requests: Sequence[RowRequest], logits: Tensor) -> Tensor:
    """Those of some of the requests, adjusted and penalized where a request asks for it; no copy when the logits are
    all taken as they are."""
    if len(indices) == len(requests) and all(request.takes_logits_as_they_are for request in requests):
        return logits
    blocks = torch.split(logits, [request.step.row_count for request in requests])
    return torch.cat([_processed(requests[i], blocks[i]) for i in indices])


def _processed(request: RowRequest, block: Tensor) -> Tensor:
    """Apply the request's adjustments, then penalties, in the order of vLLM and transformers."""
    if request.adjustments is not None:
        block = request.adjustments.applied(block, request.base_length)
    return block if request.history is None else penalized(block, request.history, request.sampling)


_Rows: TypeAlias = tuple[TargetRow, ...] | None
_Choose: TypeAlias = Callable[[Sequence[RowRequest], Tensor, Sampler], list[_Rows]]


def _by_way(requests: Sequence[RowRequest]) -> dict[_Choose, list[int]]:
    """Which requests' rows come about in the same way."""
    found: dict[_Choose, list[int]] = {}
    for i, request in enumerate(requests):
        found.setdefault(_way(request), []).append(i)
    return found


def _way(request: RowRequest) -> _Choose:
    if request.step.row_kind is RowKind.DENSE:
        return _dense_rows
    if request.needs_only_argmax:
        return _argmax_tokens
    return _drawn_tokens if request.step.row_kind is RowKind.TOKEN else _support_rows


def _dense_rows(requests: Sequence[RowRequest], logits: Tensor, _: Sampler) -> list[_Rows]:
    rows = logits.float().cpu().numpy()
    # NaN is the highest wherever it is.
    return _parts(requests, [DenseRow(row) if isfinite(row.max()) else None for row in rows])


def _argmax_tokens(requests: Sequence[RowRequest], logits: Tensor, sampler: Sampler) -> list[_Rows]:
    return _parts(requests, [_token_row(token_id) for token_id in sampler.argmax(logits)])


def _drawn_tokens(requests: Sequence[RowRequest], logits: Tensor, sampler: Sampler) -> list[_Rows]:
    probs = sampler.probabilities(logits, _sampling(requests))
    samples = sampler.sample_tokens(probs, _keys(requests, logits))
    return _parts(requests, [_token_row(token_id) for token_id in samples])


def _token_row(token_id: int) -> TokenRow | None:
    return None if token_id < 0 else TokenRow(token_id)


def _parts(requests: Sequence[RowRequest], rows: Sequence[TargetRow | None]) -> list[_Rows]:
    """Each request's own rows; None where one of them is."""
    ends = accumulate(request.step.row_count for request in requests)
    return [
        _all_or_none(rows[end - request.step.row_count : end])
        for request, end in zip(requests, ends, strict=True)
    ]


def _all_or_none(rows: Sequence[TargetRow | None]) -> _Rows:
    found = tuple(row for row in rows if row is not None)
    return found if len(found) == len(rows) else None


def _sampling(requests: Sequence[RowRequest]) -> list[SamplingParams]:
    """Return the sampling parameters of each row."""
    return [request.sampling for request in requests for _ in range(request.step.row_count)]


def _keys(requests: Sequence[RowRequest], logits: Tensor) -> Tensor:
    """Return the key of each row, int64 [R] on the device of the logits."""
    keys = [_own_keys(request) for request in requests]
    return torch.from_numpy(np.concatenate(keys)).to(logits.device)


def _own_keys(request: RowRequest) -> IntArray:
    """Return the keys of the request's rows, int64 [row_count]."""
    keys_of = recovery_keys if request.races_recovery else target_keys
    return keys_of(request.sampling.seed, request.base_length, request.step.row_count)


def _support_rows(requests: Sequence[RowRequest], logits: Tensor, sampler: Sampler) -> list[_Rows]:
    """Compute the probabilities on the supports, and sample a token outside each."""
    probs = sampler.probabilities(logits, _sampling(requests))
    supports = [support for request in requests for support in _supports(request)]
    wants_statistics = [
        request.step.with_statistics for request in requests for _ in range(request.step.row_count)
    ]
    statistics_tensors = _statistics(wants_statistics, logits, probs, supports)
    inside, outside = _inside_and_outside(probs, supports)
    samples = sampler.sample(outside, _keys(requests, logits))
    sample_probs = outside.gather(1, samples[:, None])
    greedy_max_logits = _max_logits_of_greedy(requests, logits)
    inside_probs, ids, outside_probs, masses, max_logits, *statistics_parts = _to_host(
        [inside, samples, sample_probs, outside.sum(dim=-1), greedy_max_logits, *statistics_tensors]
    )
    raced = [request.races_recovery for request in requests for _ in range(request.step.row_count)]
    sizes = np.cumsum([len(support) for support in supports])[:-1]
    statistics = _read_statistics(wants_statistics, statistics_parts, sizes)
    rows = [
        SupportRow(
            support,
            support_probs,
            masses[i],
            int(ids[i]) if masses[i] > 0.0 else -1,
            statistics[i],
            outside_probs[i] if raced[i] else None,
        )
        if isfinite(masses[i] + support_probs.sum()) and isfinite(max_logits[i])
        else None
        for i, (support, support_probs) in enumerate(
            zip(supports, np.split(inside_probs, sizes), strict=True)
        )
    ]
    return _parts(requests, rows)


def _max_logits_of_greedy(requests: Sequence[RowRequest], logits: Tensor) -> Tensor:
    """Return the maximum logit of each row, [R], if a row is greedy.

    One-hot probabilities hide logits that are not finite; in other rows the probabilities show them.
    """
    if any(request.sampling.is_greedy for request in requests):
        return logits.amax(dim=-1)
    return logits.new_zeros(len(logits))


def _to_host(tensors: Sequence[Tensor]) -> list[FloatArray]:
    """All of the tensors as flat float64 arrays, which hold ids and float32 exactly: one copy waits for the device."""
    flat = torch.cat([tensor.reshape(-1).double() for tensor in tensors]).cpu().numpy()
    return np.split(flat, np.cumsum([tensor.numel() for tensor in tensors])[:-1])


def _supports(request: RowRequest) -> list[IntArray]:
    """The support of each row; none for rows past the proposal."""
    supports = request.step.supports
    return [*supports, *[_NO_SUPPORT] * (request.step.row_count - len(supports))]


def _inside_and_outside(probs: Tensor, supports: Sequence[IntArray]) -> tuple[Tensor, Tensor]:
    """Probabilities on the rows' supports, one row's after the other's, and the rows with the support set to zero, in
    place: a copy of rows times vocabulary would cost more than drawing from it."""
    if not any(map(len, supports)):
        return probs.new_empty(0), probs
    rows, token_ids = _places(supports, probs.device)
    inside = probs[rows, token_ids]
    probs[rows, token_ids] = 0.0
    return inside, probs


def _places(supports: Sequence[IntArray], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of each id of the supports, int64 [ids in all] each."""
    rows = np.repeat(np.arange(len(supports)), [len(support) for support in supports])
    both = torch.from_numpy(np.stack((rows, np.concatenate(supports)))).to(device)
    return both[0], both[1]


def _statistics(
    wants_statistics: Sequence[bool], logits: Tensor, probs: Tensor, supports: Sequence[IntArray]
) -> tuple[Tensor, ...]:
    """Compute statistics of whole rows if any row needs them.

    Returns:
        Entropy, maximum probability and argmax, [R] each, then rank and logit of each id of the supports.
    """
    if not any(wants_statistics):
        return ()
    max_probs, argmaxes = probs.max(dim=-1)
    rows, token_ids = _places(supports, probs.device)
    own = probs[rows, token_ids]
    # A row at a time: all at once would need ids times vocabulary.
    ranks = [(probs[row] > part[:, None]).sum(dim=-1)
             for row, part in enumerate(torch.split(own, [len(support) for support in supports]))]  # fmt: skip
    entropies = torch.special.entr(probs).sum(dim=-1)
    return entropies, max_probs, argmaxes, torch.cat(ranks), logits[rows, token_ids].float()


def _read_statistics(
    wants_statistics: Sequence[bool], statistics_parts: Sequence[FloatArray], sizes: IntArray
) -> list[RowStatistics | None]:
    """Statistics of `_statistics` for the rows that were requested."""
    if not statistics_parts:
        return [None] * len(wants_statistics)
    entropies, max_probs, argmaxes, ranks, logits = statistics_parts
    return [
        RowStatistics(
            entropy=float(entropies[i]),
            max_prob=float(max_probs[i]),
            argmax_token_id=int(argmaxes[i]),
            ranks=own_ranks.astype(np.int64),
            logits=own_logits.astype(np.float32),
        )
        if wanted
        else None
        for i, (wanted, own_ranks, own_logits) in enumerate(
            zip(wants_statistics, np.split(ranks, sizes), np.split(logits, sizes), strict=True)
        )
    ]
