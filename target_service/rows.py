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
        """True if the coordinator races on with the noise that drew the rows' samples."""
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
    drawn = sampler.sample_tokens(probs, _keys(requests, logits))
    return _parts(requests, [_token_row(token_id) for token_id in drawn])


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
    """Of each row."""
    return [request.sampling for request in requests for _ in range(request.step.row_count)]


def _keys(requests: Sequence[RowRequest], logits: Tensor) -> Tensor:
    """Of each row, int64 [R] on the device of the logits."""
    keys = [_own_keys(request) for request in requests]
    return torch.from_numpy(np.concatenate(keys)).to(logits.device)


def _own_keys(request: RowRequest) -> IntArray:
    """Of the request's rows, int64 [row_count]."""
    keys_of = recovery_keys if request.races_recovery else target_keys
    return keys_of(request.sampling.seed, request.base_length, request.step.row_count)


def _support_rows(requests: Sequence[RowRequest], logits: Tensor, sampler: Sampler) -> list[_Rows]:
    """Probabilities on the supports, and a token of all outside them."""
    probs = sampler.probabilities(logits, _sampling(requests))
    supports = [support for request in requests for support in _supports(request)]
    asked = [request.step.with_statistics for request in requests for _ in range(request.step.row_count)]
    figures = _statistics(asked, logits, probs, supports)
    inside, outside = _inside_and_outside(probs, supports)
    drawn = sampler.sample(outside, _keys(requests, logits))
    won = outside.gather(1, drawn[:, None])
    inside_probs, ids, winners, masses, highest, *statistics_parts = _to_host(
        [inside, drawn, won, outside.sum(dim=-1), _max_logits_of_greedy(requests, logits), *figures]
    )
    raced = [request.races_recovery for request in requests for _ in range(request.step.row_count)]
    sizes = np.cumsum([len(support) for support in supports])[:-1]
    statistics = _read_statistics(asked, statistics_parts, sizes)
    rows = [
        SupportRow(
            support,
            chances,
            masses[i],
            int(ids[i]) if masses[i] > 0.0 else -1,
            statistics[i],
            winners[i] if raced[i] else None,
        )
        if isfinite(masses[i] + chances.sum()) and isfinite(highest[i])
        else None
        for i, (support, chances) in enumerate(zip(supports, np.split(inside_probs, sizes), strict=True))
    ]
    return _parts(requests, rows)


def _max_logits_of_greedy(requests: Sequence[RowRequest], logits: Tensor) -> Tensor:
    """The highest logit of each row, [R], where a row is greedy: one-hot, it has probabilities whatever its logits are.
    Of the others the probabilities tell."""
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
    asked: Sequence[bool], logits: Tensor, probs: Tensor, supports: Sequence[IntArray]
) -> tuple[Tensor, ...]:
    """Figures of whole rows, if any row's are asked for: entropy, highest probability and its id [R] each, then rank
    and logit of each id of the supports."""
    if not any(asked):
        return ()
    highest, argmaxes = probs.max(dim=-1)
    rows, token_ids = _places(supports, probs.device)
    own = probs[rows, token_ids]
    # A row at a time: all at once would need ids times vocabulary.
    ranks = [(probs[row] > part[:, None]).sum(dim=-1)
             for row, part in enumerate(torch.split(own, [len(support) for support in supports]))]  # fmt: skip
    entropies = torch.special.entr(probs).sum(dim=-1)
    return entropies, highest, argmaxes, torch.cat(ranks), logits[rows, token_ids].float()


def _read_statistics(
    asked: Sequence[bool], statistics_parts: Sequence[FloatArray], sizes: IntArray
) -> list[RowStatistics | None]:
    """Statistics of `_statistics` for the rows that were requested."""
    if not statistics_parts:
        return [None] * len(asked)
    entropies, highest, argmaxes, ranks, logits = statistics_parts
    return [
        RowStatistics(
            entropy=float(entropies[i]),
            max_prob=float(highest[i]),
            argmax_token_id=int(argmaxes[i]),
            ranks=own_ranks.astype(np.int64),
            logits=own_logits.astype(np.float32),
        )
        if wanted
        else None
        for i, (wanted, own_ranks, own_logits) in enumerate(
            zip(asked, np.split(ranks, sizes), np.split(logits, sizes), strict=True)
        )
    ]
