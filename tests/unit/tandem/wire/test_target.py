"""What coordinator and target say of any number of sequences survives the wire; what does not fit is refused."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import InvalidRequestError, ProtocolError
from tandem.types import (
    Cancel,
    Delta,
    DenseRow,
    DraftedOutcomes,
    Finish,
    IntArray,
    LogitAdjustments,
    RowKind,
    RowStatistics,
    SamplingParams,
    StepCost,
    SupportRow,
    TargetOptions,
    TargetRow,
    TokenRow,
    Verification,
    VerifyStep,
)
from tandem.v1 import target_pb2
from tandem.wire import target
from tandem.wire.status import Ending
from tests.unit.tandem.wire.columns import COSTS, FLOATS, IDS, corrupted, plain


@st.composite
def support_rows(draw: st.DrawFn, support: IntArray, *, with_statistics: bool) -> SupportRow:
    size = len(support)
    values = st.lists(FLOATS, min_size=size, max_size=size)
    statistics = RowStatistics(
        draw(FLOATS),
        draw(FLOATS),
        draw(IDS),
        np.array(draw(st.lists(IDS, min_size=size, max_size=size)), np.int64),
        np.array(draw(values), np.float32),
    )
    return SupportRow(
        support,
        np.array(draw(values), float),
        draw(FLOATS),
        draw(st.integers(-1, 2**31 - 1)),
        statistics if with_statistics else None,
        draw(FLOATS),
    )


@st.composite
def verifications(draw: st.DrawFn) -> tuple[VerifyStep, Verification]:
    kind = draw(st.sampled_from(RowKind))
    count = draw(st.integers(0, 4))
    with_statistics = kind is RowKind.SUPPORT and draw(st.booleans())
    supports: tuple[IntArray, ...] = ()
    rows: tuple[TargetRow, ...] = tuple(TokenRow(draw(IDS)) for _ in range(count))
    if kind is RowKind.SUPPORT:
        supports = tuple(np.arange(draw(st.integers(0, 5))) for _ in range(count))
        rows = tuple(draw(support_rows(each, with_statistics=with_statistics)) for each in supports)
    if kind is RowKind.DENSE:
        rows = tuple(DenseRow(np.array([draw(FLOATS), draw(FLOATS)], np.float32)) for _ in range(count))
    delta = Delta(draw(IDS), draw(st.lists(IDS, max_size=4)))
    step = VerifyStep(delta, kind, count, supports, with_statistics, draw(st.integers(0, 8)), draw(IDS))
    led = draw(st.integers(-1, 2**31 - 1)), draw(st.integers(-1, 2**31 - 1))
    return step, Verification(draw(st.integers(0, 2**30)), rows, draw(COSTS), *led)


@given(st.lists(verifications(), max_size=6))
def test_steps_and_verifications_survive(asked: list[tuple[VerifyStep, Verification]]) -> None:
    steps = [(number, step) for number, (step, _) in enumerate(asked, 1)]
    request = target_pb2.VerifyRequest.FromString(target.requests_to_proto(steps).SerializeToString())
    assert plain(list(target.requests_from_proto(request))) == plain(steps)
    answers = [(number, answer) for number, (_, answer) in enumerate(asked, 1)]
    response = target_pb2.VerifyResponse.FromString(target.answers_to_proto(answers).SerializeToString())
    found = {}
    for number, answer in target.answers_from_proto(response):
        assert isinstance(answer, target.Answer)
        found[number] = answer.verification(dict(steps)[number])
    assert plain(found) == plain(dict(answers))


def test_a_sequence_s_whole_life_survives_in_one_message() -> None:
    options = TargetOptions(
        "r", SamplingParams(0.7, 20, 0.9, 0.05, -(2**62)), 99, "00-aa-bb-01", 17,
        LogitAdjustments({3: 0.1, 5: -100.0}, 4, (0, 7)), "a client",
    )  # fmt: skip
    said: list[tuple[int, target.Request]] = [
        (1, options),
        (2, replace(options, adjustments=LogitAdjustments())),
        (1, VerifyStep(Delta(0, [4]), RowKind.TOKEN, 1)),
        (2, VerifyStep(Delta(3, []), RowKind.TOKEN, 0)),
        (1, VerifyStep(Delta(1, [5]), RowKind.TOKEN, 1, lead=2, min_proposed=3, alone_after_miss=True)),
        (1, Finish(2)),
        (2, Cancel()),
        (3, DraftedOutcomes(7, 0, (4, 5), (1, 0), (8, 9), lead_token_ids=(6,))),
        (4, DraftedOutcomes(9, 2, (4,))),
    ]
    assert plain(list(target.requests_from_proto(target.requests_to_proto(said)))) == plain(said)
    ends = [(1, Ending()), (2, Ending(Ending().code, "why", 0.5))]
    assert list(target.answers_from_proto(target.answers_to_proto(ends))) == ends


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("prompt_token_count", -1, "prompt_token_count is -1"),
        ("logit_adjustments", target_pb2.LogitAdjustments(min_tokens=-1), "min_tokens is -1"),
        ("logit_adjustments", target_pb2.LogitAdjustments(biases={3: 1e6}), "the bias of token 3 is 1e"),
        ("logit_adjustments", target_pb2.LogitAdjustments(biases={3: float("nan")}), "token 3 is nan"),
    ],
)
def test_an_impossible_opening_is_refused(field: str, value: object, words: str) -> None:
    message = target.requests_to_proto([(1, TargetOptions("r", SamplingParams()))])
    content = target_pb2.VerifyOpen(**{field: value})  # type: ignore[arg-type]
    message.opens[0].MergeFrom(content)
    [(number, error)] = target.requests_from_proto(message)
    assert number == 1
    assert isinstance(error, InvalidRequestError)
    assert words in str(error)


@pytest.mark.parametrize(
    "drafted",
    [
        DraftedOutcomes(7, 64, (4,)),
        DraftedOutcomes(7, -1, (4,)),
        DraftedOutcomes(7, 60, (4,), lead_token_ids=(1,) * 4),
        DraftedOutcomes(7, 0, (4,) * 65, (1,) * 65, tuple(range(65))),
    ],
)
def test_outcomes_beyond_the_bounds_are_refused(drafted: DraftedOutcomes) -> None:
    [(number, error)] = target.requests_from_proto(target.requests_to_proto([(1, drafted)]))
    assert number == 1
    assert isinstance(error, InvalidRequestError)
    assert "outcomes came at depth" in str(error)


STEP = VerifyStep(Delta(0, ()), RowKind.SUPPORT, 2, (np.array([3, 8]),), with_statistics=True)
STATISTICS = RowStatistics(0.5, 0.75, 3, np.array([0, 2]), np.array([2.5, -1.0], np.float32))
NO_STATISTICS = replace(STATISTICS, ranks=np.arange(0), logits=np.empty(0, np.float32))
VERIFICATION = Verification(
    4,
    (
        SupportRow(np.array([3, 8]), np.array([0.75, 0.125]), 0.125, 5, STATISTICS, 0.0625),
        SupportRow(np.arange(0), np.empty(0), 1.0, 9, NO_STATISTICS, 0.5),
    ),
    StepCost(0.5, 3, 9),
)


def answers() -> target_pb2.VerifyResponse:
    return target.answers_to_proto([(number, VERIFICATION) for number in (1, 2, 3)])


@given(st.data())
def test_corrupted_columns_of_an_answer_are_refused_or_have_the_requested_shape(data: st.DataObject) -> None:
    message = corrupted(data, answers())
    try:
        found = [answer for _, answer in target.answers_from_proto(message)]
        verified = [each.verification(STEP) for each in found if isinstance(each, target.Answer)]
    except ProtocolError:
        return
    for verification in verified:
        for row, size in zip(verification.rows, (2, 0), strict=True):
            assert isinstance(row, SupportRow)
            assert len(row.token_ids) == len(row.probs) == size


@given(st.data())
def test_corrupted_columns_of_a_request_are_refused_or_are_steps(data: st.DataObject) -> None:
    message = corrupted(data, target.requests_to_proto([(number, STEP) for number in (1, 2, 3)]))
    try:
        found = list(target.requests_from_proto(message))
    except ProtocolError:
        return
    for _, step in found:
        assert isinstance(step, InvalidRequestError) or (
            isinstance(step, VerifyStep) and len(step.supports) in (0, step.row_count)
        )


@pytest.mark.parametrize(
    ("owner", "name", "content", "words"),
    [
        ("", "records", b"\1", "the column of answers holds 1 bytes; it must hold a multiple of 24"),
        ("", "records", b"", "the column of rows has 6 values, and parts of 0 in all"),
        (
            "",
            "records",
            struct.pack("<3if2i", 1, 4, 7, 0.0, 0, 0),
            "the column of rows has 6 values, and parts of 7 in all",
        ),
        (
            "",
            "records",
            struct.pack("<3if2i", 1, 4, -1, 0.0, 0, 0),
            "the column of rows has a part of -1 values",
        ),
        ("support_rows", "probabilities", b"\0", "the column of probabilities holds 1 bytes"),
        ("support_rows", "probabilities", b"\0" * 4, "has 1 values, and parts of 6 in all"),
        ("support_rows", "records", struct.pack("<ifif", -1, 0, 0, 0), "has a part of -1 values"),
    ],
)
def test_columns_that_do_not_fit_together_are_refused_in_a_sentence(
    owner: str, name: str, content: bytes, words: str
) -> None:
    message = answers()
    block = message.verifications[0]
    setattr(getattr(block, owner) if owner else block, name, content)
    with pytest.raises(ProtocolError, match=words):
        list(target.answers_from_proto(message))


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (replace(STEP, row_kind=RowKind.TOKEN, supports=()), "support_rows came where token rows were"),
        (replace(STEP, row_count=3), "2 rows came for 3 that were requested"),
        (replace(STEP, supports=(np.arange(3),)), "a support row of 2 ids came for a support of 3"),
    ],
)
def test_an_answer_to_another_step_is_refused(step: VerifyStep, words: str) -> None:
    (_, answer), *_ = target.answers_from_proto(answers())
    assert isinstance(answer, target.Answer)
    with pytest.raises(ProtocolError, match=words):
        answer.verification(step)
