"""Rows of one kind, for all sequences of a step that ask for it.

Each class says which numbers it needs on the device, computes there without waiting, and reads the result on the host,
so that a step of any mix of kinds has one copy in and one out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import isfinite
from typing import Protocol, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from tandem.engine.backends.transfers import HostArray
from tandem.engine.sampler import Sampler
from tandem.sampling.warping import parameter_rows
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
)
from target_service.row_requests import RowRequest, keys_of_rows, sampling_of_rows

Rows: TypeAlias = tuple[TargetRow, ...] | None
"""A request's rows; None where its logits are not finite."""


class RowsOfKind(Protocol):
    """The rows of some requests, in three parts."""

    def inputs(self, device: torch.device) -> list[IntArray | FloatArray]:
        """Numbers that are needed on the device of the logits."""
        ...

    def launch(self, logits: Tensor, inputs: Sequence[Tensor], sampler: Sampler) -> list[Tensor]:
        """Computes on the device, without waiting for it.

        Args:
            logits: [rows of the requests in order, vocabulary_size], any floating type.
            inputs: those of `inputs`, on the device.
            sampler: computes and draws.

        Returns:
            What the host needs.
        """
        ...

    def rows(self, found: Sequence[HostArray]) -> list[Rows]:
        """The rows of each request, from what `launch` returned."""
        ...


MakeRows: TypeAlias = Callable[[Sequence[RowRequest]], RowsOfKind]


def kind_of(request: RowRequest) -> MakeRows:
    """The class that makes a request's rows."""
    if request.step.row_kind is RowKind.DENSE:
        return DenseRows
    if request.needs_only_argmax:
        return GreedyTokens
    return DrawnTokens if request.step.row_kind is RowKind.TOKEN else SupportRows


class DenseRows:
    """Logits of the whole vocabulary. See `RowsOfKind`."""

    def __init__(self, requests: Sequence[RowRequest]) -> None:
        self._requests = requests

    def inputs(self, device: torch.device) -> list[IntArray | FloatArray]:
        """None."""
        return []

    def launch(self, logits: Tensor, inputs: Sequence[Tensor], sampler: Sampler) -> list[Tensor]:
        """float32 [R, V]."""
        return [logits.float()]

    def rows(self, found: Sequence[HostArray]) -> list[Rows]:
        """See `RowsOfKind`."""
        # NaN is the highest wherever it is.
        rows = [DenseRow(row) if isfinite(row.max()) else None for row in found[0]]
        return parts(self._requests, rows)


class GreedyTokens:
    """The id of each row's highest logit. See `RowsOfKind`."""

    def __init__(self, requests: Sequence[RowRequest]) -> None:
        self._requests = requests

    def inputs(self, device: torch.device) -> list[IntArray | FloatArray]:
        """None."""
        return []

    def launch(self, logits: Tensor, inputs: Sequence[Tensor], sampler: Sampler) -> list[Tensor]:
        """int64 [R]; -1 for logits that are not finite."""
        return [sampler.argmax(logits)]

    def rows(self, found: Sequence[HostArray]) -> list[Rows]:
        """See `RowsOfKind`."""
        return parts(self._requests, token_rows(found[0]))


class DrawnTokens:
    """A sampled id of each row. See `RowsOfKind`."""

    def __init__(self, requests: Sequence[RowRequest]) -> None:
        self._requests = requests
        self._sampling = sampling_of_rows(requests)

    def inputs(self, device: torch.device) -> list[IntArray | FloatArray]:
        """Keys and parameters."""
        return [keys_of_rows(self._requests), *_parameters(self._sampling, device)]

    def launch(self, logits: Tensor, inputs: Sequence[Tensor], sampler: Sampler) -> list[Tensor]:
        """int64 [R]; -1 for logits that are not finite."""
        keys, *columns = inputs
        probs = sampler.probabilities(logits, self._sampling, *columns)
        return [sampler.sample_tokens(probs, keys)]

    def rows(self, found: Sequence[HostArray]) -> list[Rows]:
        """See `RowsOfKind`."""
        return parts(self._requests, token_rows(found[0]))


class SupportRows:
    """Probabilities on the supports, and a token sampled outside each. See `RowsOfKind`."""

    def __init__(self, requests: Sequence[RowRequest]) -> None:
        self._requests = requests
        self._sampling = sampling_of_rows(requests)
        self._supports = [support for request in requests for support in request.supports]
        self._sizes = [len(support) for support in self._supports]
        self._wants_statistics = [
            request.step.with_statistics for request in requests for _ in range(request.step.row_count)
        ]

    def inputs(self, device: torch.device) -> list[IntArray | FloatArray]:
        """Keys, row and column of each id of the supports, and parameters."""
        rows = np.repeat(np.arange(len(self._supports)), self._sizes)
        places = np.stack((rows, np.concatenate(self._supports)))
        return [keys_of_rows(self._requests), places, *_parameters(self._sampling, device)]

    def launch(self, logits: Tensor, inputs: Sequence[Tensor], sampler: Sampler) -> list[Tensor]:
        """Probabilities inside, samples outside and their probabilities, masses outside, highest logits; statistics
        if any row needs them."""
        keys, (rows, token_ids), *columns = inputs
        probs = sampler.probabilities(logits, self._sampling, *columns)
        statistics: list[Tensor] = []
        if any(self._wants_statistics):
            statistics = self._statistics(logits, probs, rows, token_ids)
        inside = probs.new_empty(0)
        if len(token_ids):
            inside = probs[rows, token_ids]
            probs[rows, token_ids] = (
                0.0  # a copy of rows times vocabulary would cost more than drawing from it
            )
        samples = sampler.sample(probs, keys)
        sample_probs = probs.gather(1, samples[:, None])[:, 0]
        return [inside, samples, sample_probs, probs.sum(dim=-1), self._max_logits(logits), *statistics]

    def rows(self, found: Sequence[HostArray]) -> list[Rows]:
        """See `RowsOfKind`."""
        inside, ids, outside_probs, masses, max_logits, *statistics_parts = found
        raced = [request.races_recovery for request in self._requests for _ in range(request.step.row_count)]
        bounds = [0, *accumulate(self._sizes)]
        statistics = _read_statistics(self._wants_statistics, statistics_parts, bounds[1:-1])
        is_finite = self._finite_rows(inside, masses, max_logits)
        rows: list[TargetRow | None] = [None] * len(ids)
        columns = zip(
            self._supports, masses.tolist(), ids.tolist(), outside_probs.tolist(), statistics, strict=True
        )
        for i, (support, mass, token_id, outside_prob, own_statistics) in enumerate(columns):
            if is_finite[i]:
                rows[i] = SupportRow(
                    support,
                    inside[bounds[i] : bounds[i + 1]],
                    mass,
                    token_id if mass > 0.0 else -1,
                    own_statistics,
                    outside_prob if raced[i] else None,
                )
        return parts(self._requests, rows)

    def _finite_rows(self, inside: HostArray, masses: HostArray, max_logits: HostArray) -> list[bool]:
        """Which rows hold finite numbers alone."""
        found = np.isfinite(masses) & np.isfinite(max_logits)
        are_finite = np.isfinite(inside)
        if not are_finite.all():
            found[np.repeat(np.arange(len(found)), self._sizes)[~are_finite]] = False
        return cast("list[bool]", found.tolist())

    def _max_logits(self, logits: Tensor) -> Tensor:
        """The highest logit of each row, float32 [R], if a row is greedy.

        One-hot probabilities hide logits that are not finite; in other rows the probabilities show them.
        """
        if any(request.sampling.is_greedy for request in self._requests):
            return logits.amax(dim=-1).float()
        return logits.new_zeros(len(logits), dtype=torch.float32)

    def _statistics(self, logits: Tensor, probs: Tensor, rows: Tensor, token_ids: Tensor) -> list[Tensor]:
        """Entropy, maximum probability and argmax of each row, [R]; then rank and logit of each id of the supports."""
        max_probs, argmaxes = probs.max(dim=-1)
        own = probs[rows, token_ids]
        # A row at a time: all at once would need ids times vocabulary.
        ranks = [(probs[row] > part[:, None]).sum(dim=-1)
                 for row, part in enumerate(torch.split(own, self._sizes))]  # fmt: skip
        entropies = torch.special.entr(probs).sum(dim=-1)
        return [entropies, max_probs, argmaxes, torch.cat(ranks), logits[rows, token_ids].float()]


def parts(requests: Sequence[RowRequest], rows: Sequence[TargetRow | None]) -> list[Rows]:
    """Each request's own rows; None where one of them is."""
    ends = accumulate(request.step.row_count for request in requests)
    return [
        _all_or_none(rows[end - request.step.row_count : end])
        for request, end in zip(requests, ends, strict=True)
    ]


def token_rows(token_ids: HostArray) -> list[TokenRow | None]:
    """A row for each id; None for -1."""
    return [None if token_id < 0 else TokenRow(token_id) for token_id in token_ids.tolist()]


def _all_or_none(rows: Sequence[TargetRow | None]) -> Rows:
    found = tuple(row for row in rows if row is not None)
    return found if len(found) == len(rows) else None


def _parameters(sampling: Sequence[SamplingParams], device: torch.device) -> list[FloatArray]:
    """The parameters for the device, if that is another; a CPU takes them from `sampling`."""
    return [] if device.type == "cpu" else [parameter_rows(sampling)]


def _read_statistics(
    wants_statistics: Sequence[bool], found: Sequence[HostArray], ends: Sequence[int]
) -> list[RowStatistics | None]:
    """The statistics of the rows that asked for them."""
    if not found:
        return [None] * len(wants_statistics)
    entropies, max_probs, argmaxes, ranks, logits = found
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
            zip(wants_statistics, np.split(ranks, ends), np.split(logits, ends), strict=True)
        )
    ]
