"""From the target's logits to the rows that coordinators ask for, for all sequences of a step at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from tandem.engine.sampling import BY_TORCH, Sampler
from tandem.noise import target_keys
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
from target_service.penalties import History, penalized

_NO_SUPPORT: IntArray = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class RowRequest:
    """What one sequence wants of a step."""

    step: VerifyStep
    sampling: SamplingParams
    history: History | None = None
    """What stands in the sequence, where penalties ask for it."""

    @property
    def base_length(self) -> int:
        """Length of the sequence whose next token the first row tells."""
        return self.step.delta.length - self.step.row_count + 1

    @property
    def needs_only_argmax(self) -> bool:
        """Whether the highest logit of each row is all there is to tell."""
        return self.step.row_kind is RowKind.TOKEN and self.sampling.is_greedy


def verifications(
    requests: Sequence[RowRequest], logits: Tensor, sampler: Sampler = BY_TORCH
) -> list[Verification]:
    """The rows of each request.

    Args:
        requests: What each sequence wants.
        logits: [rows of all requests in order, vocabulary_size], any floating type.
        sampler: What computes and draws.
    """
    rows: list[tuple[TargetRow, ...]] = [()] * len(requests)
    for choose, indices in _by_way(requests).items():
        chosen = choose([requests[i] for i in indices], _logits_of(indices, requests, logits), sampler)
        for i, row in zip(indices, chosen, strict=True):
            rows[i] = row
    return [Verification(request.base_length, row) for request, row in zip(requests, rows, strict=True)]


def _logits_of(indices: Sequence[int], requests: Sequence[RowRequest], logits: Tensor) -> Tensor:
    """Those of some of the requests, penalized where a request asks for it; no copy of what is all there is."""
    if len(indices) == len(requests) and all(request.history is None for request in requests):
        return logits
    blocks = torch.split(logits, [request.step.row_count for request in requests])
    return torch.cat([_penalized(requests[i], blocks[i]) for i in indices])


def _penalized(request: RowRequest, block: Tensor) -> Tensor:
    return block if request.history is None else penalized(block, request.history, request.sampling)


_Choose: TypeAlias = Callable[[Sequence[RowRequest], Tensor, Sampler], list[tuple[TargetRow, ...]]]


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
        return _best_tokens
    return _drawn_tokens if request.step.row_kind is RowKind.TOKEN else _support_rows


def _dense_rows(requests: Sequence[RowRequest], logits: Tensor, _: Sampler) -> list[tuple[TargetRow, ...]]:
    return _parts(requests, [DenseRow(row) for row in logits.float().cpu().numpy()])


def _best_tokens(
    requests: Sequence[RowRequest], logits: Tensor, sampler: Sampler
) -> list[tuple[TargetRow, ...]]:
    return _parts(requests, [TokenRow(token_id) for token_id in sampler.best(logits).tolist()])


def _drawn_tokens(
    requests: Sequence[RowRequest], logits: Tensor, sampler: Sampler
) -> list[tuple[TargetRow, ...]]:
    probs = sampler.warped(logits, _sampling(requests))
    drawn = sampler.raced(probs, _keys(requests, logits))
    # Of logits that are no numbers nothing can be drawn, and the coordinator is told so.
    drawn = torch.where(probs.sum(dim=-1) > 0.0, drawn, -1)
    return _parts(requests, [TokenRow(token_id) for token_id in drawn.tolist()])


def _parts(requests: Sequence[RowRequest], rows: Sequence[TargetRow]) -> list[tuple[TargetRow, ...]]:
    """Each request's own rows."""
    ends = accumulate(request.step.row_count for request in requests)
    return [
        tuple(rows[end - request.step.row_count : end]) for request, end in zip(requests, ends, strict=True)
    ]


def _sampling(requests: Sequence[RowRequest]) -> list[SamplingParams]:
    """Of each row."""
    return [request.sampling for request in requests for _ in range(request.step.row_count)]


def _keys(requests: Sequence[RowRequest], logits: Tensor) -> Tensor:
    """Of each row, int64 [R] on the device of the logits."""
    keys = [
        target_keys(request.sampling.seed, request.base_length, request.step.row_count)
        for request in requests
    ]
    return torch.from_numpy(np.concatenate(keys)).to(logits.device)


def _support_rows(
    requests: Sequence[RowRequest], logits: Tensor, sampler: Sampler
) -> list[tuple[TargetRow, ...]]:
    """Probabilities on the supports, and a token of all outside them."""
    probs = sampler.warped(logits, _sampling(requests))
    supports = [support for request in requests for support in _supports(request)]
    asked = [request.step.with_statistics for request in requests for _ in range(request.step.row_count)]
    figures = _statistics(asked, logits, probs, supports)
    inside, outside = _inside_and_outside(probs, supports)
    drawn = sampler.raced(outside, _keys(requests, logits))
    insides, ids, masses, *told = _to_host([inside, drawn, outside.sum(dim=-1), *figures])
    sizes = np.cumsum([len(support) for support in supports])[:-1]
    statistics = _read_statistics(asked, told, sizes)
    rows = [
        SupportRow(support, chances, masses[i], int(ids[i]) if masses[i] > 0.0 else -1, statistics[i])
        for i, (support, chances) in enumerate(zip(supports, np.split(insides, sizes), strict=True))
    ]
    return _parts(requests, rows)


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
    asked: Sequence[bool], told: Sequence[FloatArray], sizes: IntArray
) -> list[RowStatistics | None]:
    """What `_statistics` computed, for the rows that are asked for."""
    if not told:
        return [None] * len(asked)
    entropies, highest, argmaxes, ranks, logits = told
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
