"""From the target's logits to the rows that coordinators ask for, for all sequences of a step at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    blocks = [
        block if request.history is None else penalized(block, request.history, request.sampling)
        for block, request in zip(
            torch.split(logits, [request.step.row_count for request in requests]), requests, strict=True
        )
    ]
    sampled = [i for i, request in enumerate(requests) if _samples(request)]
    rows: list[tuple[TargetRow, ...]] = [()] * len(requests)
    if greedy := [i for i, request in enumerate(requests) if request.needs_only_argmax]:
        for i, tokens in _split(greedy, requests, torch.cat([blocks[i] for i in greedy]).argmax(dim=-1)):
            rows[i] = tuple(map(TokenRow, tokens.tolist()))
    if sampled:
        drawn = _sampled_rows(
            [requests[i] for i in sampled], torch.cat([blocks[i] for i in sampled]), sampler
        )
        for i, row in zip(sampled, drawn, strict=True):
            rows[i] = row
    for i, request in enumerate(requests):
        if request.step.row_kind is RowKind.DENSE:
            rows[i] = tuple(DenseRow(row) for row in blocks[i].float().cpu().numpy())
    return [Verification(request.base_length, row) for request, row in zip(requests, rows, strict=True)]


def _samples(request: RowRequest) -> bool:
    return request.step.row_kind is not RowKind.DENSE and not request.needs_only_argmax


def _split(
    indices: Sequence[int], requests: Sequence[RowRequest], values: Tensor
) -> list[tuple[int, Tensor]]:
    """The values of each request's rows."""
    parts = torch.split(values.cpu(), [requests[i].step.row_count for i in indices])
    return list(zip(indices, parts, strict=True))


def _sampled_rows(
    requests: Sequence[RowRequest], logits: Tensor, sampler: Sampler
) -> list[tuple[TargetRow, ...]]:
    """Rows that are drawn from the warped distribution."""
    counts = [request.step.row_count for request in requests]
    sampling = [request.sampling for request in requests for _ in range(request.step.row_count)]
    probs = sampler.warped(logits, sampling)
    supports = [support for request in requests for support in _supports(request)]
    asked = [request.step.with_statistics for request in requests for _ in range(request.step.row_count)]
    figures = _statistics(asked, logits, probs, supports)
    inside, outside = _inside_and_outside(probs, supports)
    keys = [
        target_keys(request.sampling.seed, request.base_length, request.step.row_count)
        for request in requests
    ]
    drawn = sampler.raced(outside, torch.from_numpy(np.concatenate(keys)).to(logits.device))
    insides, ids, masses, *told = _to_host([inside, drawn, outside.sum(dim=-1), *figures])
    sizes = np.cumsum([len(support) for support in supports])[:-1]
    statistics = _read_statistics(asked, told, sizes)
    rows: list[TargetRow] = [
        SupportRow(support, chances, masses[i], int(ids[i]) if masses[i] > 0.0 else -1, statistics[i])
        for i, (support, chances) in enumerate(zip(supports, np.split(insides, sizes), strict=True))
    ]
    parts = [rows[sum(counts[:i]) : sum(counts[: i + 1])] for i in range(len(counts))]
    return [
        tuple(part) if request.step.row_kind is RowKind.SUPPORT else tuple(_token_row(row) for row in part)
        for request, part in zip(requests, parts, strict=True)
    ]


def _to_host(tensors: Sequence[Tensor]) -> list[FloatArray]:
    """All of the tensors as flat float64 arrays, which hold ids and float32 exactly: one copy waits for the device."""
    flat = torch.cat([tensor.reshape(-1).double() for tensor in tensors]).cpu().numpy()
    return np.split(flat, np.cumsum([tensor.numel() for tensor in tensors])[:-1])


def _token_row(row: TargetRow) -> TokenRow:
    """A sample of the whole distribution: with an empty support everything is outside it."""
    assert isinstance(row, SupportRow)
    return TokenRow(row.outside_token_id)


def _supports(request: RowRequest) -> list[IntArray]:
    """The support of each row; none for rows past the proposal, and none at all for token rows."""
    supports = request.step.supports if request.step.row_kind is RowKind.SUPPORT else ()
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
