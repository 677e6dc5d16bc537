"""Target options, steps and rows survive a trip over the wire; impossible ones are refused."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.errors import InvalidRequestError, ProtocolError
from tandem.types import (
    Delta,
    DenseRow,
    IntArray,
    RowKind,
    RowStatistics,
    SamplingParams,
    SupportRow,
    TargetOptions,
    TokenRow,
    Verification,
    VerifyStep,
)
from tandem.v1 import target_pb2, types_pb2
from tandem.wire import target

SAMPLING = SamplingParams(0.7, 20, 0.9, 0.05, -(2**62))


def ids(*values: int) -> IntArray:
    return np.array(values, dtype=np.int64)


def test_options_and_steps_survive() -> None:
    options = TargetOptions("r", SAMPLING, 99, "00-aa-bb-01")
    assert target.options_from_proto(target.options_to_proto(options).open) == options
    step = VerifyStep(Delta(3, [4, 5]), RowKind.SUPPORT, 3, (ids(1, 2), ids()), True, True)
    back = target.step_from_proto(target.step_to_proto(step).step)
    assert (back.delta, back.row_kind, back.row_count) == (step.delta, RowKind.SUPPORT, 3)
    assert (back.with_statistics, back.raced_recovery) == (True, True)
    assert [support.tolist() for support in back.supports] == [[1, 2], []]
    finish = target.finish_to_proto(0)
    assert finish.WhichOneof("message") == "finish"
    assert target.kept_from_proto(finish.finish) == 0
    assert target.kept_from_proto(target_pb2.VerifyFinish()) is None, "from an older coordinator"


def round_trip(verification: Verification, step: VerifyStep) -> Verification:
    return target.verification_from_proto(target.verification_to_proto(verification), step)


def test_token_rows_survive() -> None:
    step = VerifyStep(Delta(0, [1]), RowKind.TOKEN, 2)
    back = round_trip(Verification(4, (TokenRow(7), TokenRow(0))), step)
    assert (back.base_length, back.rows) == (4, (TokenRow(7), TokenRow(0)))


def test_support_rows_survive() -> None:
    statistics = RowStatistics(0.5, 0.75, 3, ids(0, 2), np.array([2.5, -1.0], dtype=np.float32))
    rows = (
        SupportRow(ids(3, 8), np.array([0.75, 0.125]), 0.125, 5, statistics, 0.0625),
        SupportRow(ids(), np.array([]), 1.0, 9),
    )
    step = VerifyStep(Delta(0, [1]), RowKind.SUPPORT, 2, (ids(3, 8),), True)
    first, second = round_trip(Verification(4, rows), step).rows
    assert isinstance(first, SupportRow)
    assert (first.token_ids.tolist(), first.probs.tolist()) == ([3, 8], [0.75, 0.125])
    assert (first.outside_mass, first.outside_token_id, first.outside_prob) == (0.125, 5, 0.0625)
    assert first.statistics is not None
    assert (first.statistics.entropy, first.statistics.max_prob, first.statistics.argmax_token_id) == (
        0.5,
        0.75,
        3,
    )
    assert first.statistics.ranks.tolist() == [0, 2]
    assert first.statistics.logits.tolist() == [2.5, -1.0]
    assert isinstance(second, SupportRow)
    assert (len(second.token_ids), second.outside_mass, second.outside_token_id) == (0, 1.0, 9)
    assert second.statistics is None
    assert second.outside_prob is None


def test_an_outside_probability_of_zero_is_not_taken_for_unset() -> None:
    """Zero means that the target sampled outside the support and found no probability there; unset, that it did not."""
    step = VerifyStep(Delta(0, [1]), RowKind.SUPPORT, 1, (ids(3),), raced_recovery=True)
    (row,) = round_trip(Verification(4, (SupportRow(ids(3), np.ones(1), 0.0, -1, None, 0.0),)), step).rows
    assert isinstance(row, SupportRow)
    assert row.outside_prob == 0.0


def test_dense_rows_survive() -> None:
    logits = np.arange(6, dtype=np.float32).reshape(2, 3)
    step = VerifyStep(Delta(0, [1]), RowKind.DENSE, 2)
    first, second = round_trip(Verification(4, (DenseRow(logits[0]), DenseRow(logits[1]))), step).rows
    assert isinstance(first, DenseRow)
    assert isinstance(second, DenseRow)
    assert np.array_equal([first.logits, second.logits], logits)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (target_pb2.VerifyResponse(), "0 rows came for 2"),
        (target_pb2.VerifyResponse(token_rows=target_pb2.TokenRows(token_ids=[1])), "1 rows came for 2"),
        (
            target_pb2.VerifyResponse(
                dense_rows=types_pb2.Tensor(data_type=types_pb2.DATA_TYPE_FLOAT32, shape=[2, 3], data=b"1234")
            ),
            "dense_rows came where token rows were requested",
        ),
    ],
)
def test_impossible_verifications_are_refused(message: target_pb2.VerifyResponse, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        target.verification_from_proto(message, VerifyStep(Delta(0, [1]), RowKind.TOKEN, 2))


@pytest.mark.parametrize(
    "step",
    [
        target_pb2.VerifyStep(row_count=-1, row_kind=types_pb2.ROW_KIND_TOKEN),
        target_pb2.VerifyStep(row_count=1),
        target_pb2.VerifyStep(row_kind=9, row_count=1),  # type: ignore[arg-type]
        target_pb2.VerifyStep(row_kind=types_pb2.ROW_KIND_TOKEN, delta=types_pb2.Delta(base_length=-1)),
        target_pb2.VerifyStep(row_kind=types_pb2.ROW_KIND_SUPPORT, supports=[target_pb2.Support()]),
    ],
)
def test_impossible_steps_are_refused(step: target_pb2.VerifyStep) -> None:
    with pytest.raises(InvalidRequestError):
        target.step_from_proto(step)
