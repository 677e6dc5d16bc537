"""The rows that one sequence wants of a step, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tandem.sampling.noise import Purpose, recovery_keys, stream_keys, target_keys
from tandem.types import IntArray, RowKind, SamplingParams, VerifyStep
from target_service.adjustments import Adjustments
from target_service.penalties import History

_MANY = 8
"""Sequences from which on their keys are computed by arrays: some 50 us and 2 for each, where integers take 11."""

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

    @property
    def supports(self) -> list[IntArray]:
        """The support of each row; an empty one for rows past the proposal."""
        supports = self.step.supports
        return [*supports, *[_NO_SUPPORT] * (self.step.row_count - len(supports))]

    @property
    def keys(self) -> IntArray:
        """The noise key of each row, int64 [row_count]."""
        keys_of = recovery_keys if self.races_recovery else target_keys
        return keys_of(self.sampling.seed, self.base_length, self.step.row_count)


def keys_of_rows(requests: Sequence[RowRequest]) -> IntArray:
    """Return the key of each row of all requests, int64 [R]."""
    if len(requests) < _MANY:
        return np.concatenate([request.keys for request in requests])
    counts, bases, seeds, races = np.array(
        [
            (request.step.row_count, request.base_length, request.sampling.seed, request.races_recovery)
            for request in requests
        ],
        dtype=np.int64,
    ).T
    rows = np.arange(counts.sum())
    positions = rows + np.repeat(bases - counts.cumsum() + counts, counts)
    purposes = np.where(races, Purpose.RECOVERY, Purpose.TARGET)
    keys: IntArray = stream_keys(
        np.repeat(seeds, counts), positions, np.repeat(purposes, counts), np.repeat(bases * races, counts)
    )
    return keys


def sampling_of_rows(requests: Sequence[RowRequest]) -> list[SamplingParams]:
    """Return the sampling parameters of each row."""
    return [request.sampling for request in requests for _ in range(request.step.row_count)]
