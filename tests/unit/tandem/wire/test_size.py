"""A verify round costs a few hundred bytes on the wire, not a vocabulary of floats."""

from __future__ import annotations

import numpy as np

from coordinator.transport.remote_sequence import RemoteSequence
from tandem.types import (
    DenseRow,
    IntArray,
    RowKind,
    SupportRow,
    TargetRow,
    TokenRow,
    Verification,
    VerifyStep,
)
from tandem.wire import target

VOCABULARY_SIZE = 128_256  # Llama 3
TOKEN_COUNT = 5
CONTEXT = list(range(100_000, 104_000))
MEAN_SUPPORT = 147
"""Ids of a support on average: what the 6 KB allow (docs/verification.md)."""


def round_bytes(row_kind: RowKind, rows: tuple[TargetRow, ...], supports: tuple[IntArray, ...] = ()) -> int:
    """Serialised request and response of one round in the middle of a long text, after a rejection."""
    remote = RemoteSequence()
    remote.delta_to(CONTEXT, range(120_000, 120_000 + TOKEN_COUNT))
    committed = [*CONTEXT, 120_000, 127_999]
    delta = remote.delta_to(committed, range(121_000, 121_000 + TOKEN_COUNT))
    step = VerifyStep(delta, row_kind, TOKEN_COUNT + 1, supports)
    request = target.requests_to_proto([(1, step)]).SerializeToString()
    response = target.answers_to_proto([(1, Verification(len(committed), rows))]).SerializeToString()
    return len(request) + len(response)


def test_token_rows_take_at_most_160_bytes() -> None:
    """`greedy` and `strict`."""
    assert round_bytes(RowKind.TOKEN, (TokenRow(VOCABULARY_SIZE - 1),) * (TOKEN_COUNT + 1)) <= 160


def test_support_rows_take_at_most_6_kilobytes() -> None:
    """`residual` and `block`, with supports of the usual size."""
    support = np.arange(VOCABULARY_SIZE - MEAN_SUPPORT, VOCABULARY_SIZE)
    row = SupportRow(support, np.full(MEAN_SUPPORT, 1 / VOCABULARY_SIZE), 0.9, 7)
    bonus = SupportRow(np.array([], dtype=np.int64), np.array([]), 1.0, VOCABULARY_SIZE - 1)
    size = round_bytes(RowKind.SUPPORT, (*[row] * TOKEN_COUNT, bonus), (support,) * TOKEN_COUNT)
    assert size <= 6 * 1024


def test_dense_rows_take_hundreds_of_kilobytes() -> None:
    row = DenseRow(np.zeros(VOCABULARY_SIZE, dtype=np.float32))
    assert round_bytes(RowKind.DENSE, (row,) * (TOKEN_COUNT + 1)) > 3_000_000
