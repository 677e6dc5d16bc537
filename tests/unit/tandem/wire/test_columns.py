"""Columns say what rows say, bit for bit, and nothing but a ProtocolError comes of columns that do not fit together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import ProtocolError
from tandem.types import (
    Delta,
    IntArray,
    Proposal,
    RowKind,
    RowStatistics,
    SparseDistribution,
    StepCost,
    SupportRow,
    TargetRow,
    TokenRow,
    Verification,
    VerifyStep,
)
from tandem.v1 import draft_pb2, target_pb2
from tandem.v1.types_pb2 import SequenceEnd, SequencePart
from tandem.wire import draft, target
from tandem.wire.columns import ColumnPart

FLOATS = st.floats(0.0, 1.0, width=32)
IDS = st.integers(0, 2**31 - 1)
COSTS = st.one_of(
    st.none(),
    st.builds(StepCost, st.floats(2**-12, 100.0, width=32), st.integers(1, 8), st.integers(8, 99)),
)


@st.composite
def support_rows(draw: st.DrawFn, support: IntArray, *, with_statistics: bool, is_raced: bool) -> SupportRow:
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
        draw(FLOATS) if is_raced else None,
    )


@st.composite
def verifications(draw: st.DrawFn) -> tuple[VerifyStep, Verification]:
    kind = draw(st.sampled_from([RowKind.TOKEN, RowKind.SUPPORT]))
    count, base_length = draw(st.integers(1, 4)), draw(st.integers(0, 2**30))
    supports: tuple[IntArray, ...] = ()
    rows: tuple[TargetRow, ...] = tuple(TokenRow(draw(IDS)) for _ in range(count))
    if kind is RowKind.SUPPORT:
        sizes = draw(st.lists(st.integers(0, 5), max_size=count))
        supports = tuple(np.arange(size) for size in sizes)
        padded = [*supports, *[np.arange(0)] * (count - len(sizes))]
        with_statistics = draw(st.booleans())
        is_raced = draw(st.booleans())
        rows = tuple(
            draw(support_rows(support, with_statistics=with_statistics, is_raced=is_raced))
            for support in padded
        )
    return VerifyStep(Delta(0, ()), kind, count, supports), Verification(base_length, rows, draw(COSTS))


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    token_ids = tuple(draw(st.lists(IDS, max_size=4)))
    distributions: tuple[SparseDistribution, ...] = ()
    if draw(st.booleans()):
        distributions = tuple(draw(sparse()) for _ in token_ids)
    logits = None
    has_logits = draw(st.booleans())
    if token_ids and has_logits:
        logits = np.array([draw(FLOATS) for _ in token_ids], np.float32)
    return Proposal(draw(st.integers(0, 2**30)), token_ids, distributions, logits, draw(COSTS))


@st.composite
def sparse(draw: st.DrawFn) -> SparseDistribution:
    weights = np.array(draw(st.lists(st.integers(1, 100), min_size=1, max_size=6)), float)
    ids = draw(st.lists(IDS, min_size=len(weights), max_size=len(weights), unique=True))
    return SparseDistribution(np.array(ids), weights / weights.sum())


def plain(value: object) -> object:
    """Arrays as types and bytes, so that equal means equal bits."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    if hasattr(value, "__dataclass_fields__"):
        return [plain(getattr(value, name)) for name in value.__dataclass_fields__]
    return value


def as_columns(answers: list[Any]) -> list[SequencePart | ColumnPart[Any]]:
    """What a service puts into a message."""
    return [
        ColumnPart(number, answer, answer.ByteSize())
        if answer.HasField("columns")
        else SequencePart(sequence=number, message=answer.SerializeToString())
        for number, answer in enumerate(answers, 1)
    ]


@settings(deadline=None)
@given(asked=st.lists(verifications(), max_size=6))
def test_verifications_as_columns_are_those_as_rows(asked: list[tuple[VerifyStep, Verification]]) -> None:
    rows = [target.verification_to_proto(verification) for _, verification in asked]
    columns = [target.verification_to_proto(verification, with_columns=True) for _, verification in asked]
    assert all(answer.HasField("columns") for answer in columns)
    message = target_pb2.VerifyManyResponse.FromString(
        target.many_to_proto(as_columns(columns)).SerializeToString()
    )
    arrived = {each.sequence: each.answer for each in target.columns_from_proto(message)}
    for part in message.parts:
        arrived[part.sequence] = target_pb2.VerifyResponse.FromString(part.message)
    assert len(arrived) == len(asked)
    for number, (step, _) in enumerate(asked, 1):
        expected = plain(target.verification_from_proto(rows[number - 1], step))
        assert plain(target.verification_from_proto(arrived[number], step)) == expected
        assert plain(target.verification_from_proto(columns[number - 1], step)) == expected


@settings(deadline=None)
@given(made=st.lists(proposals(), max_size=6))
def test_proposals_as_columns_are_those_as_rows(made: list[Proposal]) -> None:
    rows = [draft.proposal_to_proto(proposal) for proposal in made]
    columns = [draft.proposal_to_proto(proposal, with_columns=True) for proposal in made]
    message = draft_pb2.ProposeManyResponse.FromString(
        draft.many_to_proto(as_columns(columns)).SerializeToString()
    )
    arrived = {each.sequence: each.answer for each in draft.columns_from_proto(message)}
    for part in message.parts:
        arrived[part.sequence] = draft_pb2.ProposeResponse.FromString(part.message)
    assert len(arrived) == len(made)
    for number, before in enumerate(rows, 1):
        expected = plain(draft.proposal_from_proto(before))
        assert plain(draft.answer_from_proto(arrived[number])) == expected
        assert plain(draft.proposal_from_proto(columns[number - 1])) == expected


def test_answers_of_three_sequences_share_columns_and_those_of_two_do_not() -> None:
    answer = target.verification_to_proto(Verification(4, (TokenRow(7),)), with_columns=True)
    two, three = (target.many_to_proto(as_columns([answer] * count)) for count in (2, 3))
    assert (len(two.parts), len(two.columns)) == (2, 0)
    assert (len(three.parts), len(three.columns)) == (0, 1)


def test_a_sequences_end_follows_its_answer() -> None:
    answer = target.verification_to_proto(Verification(4, (TokenRow(7),)), with_columns=True)
    end = SequencePart(sequence=1, end=SequenceEnd())
    message = target.many_to_proto([*as_columns([answer]), end])
    assert [part.WhichOneof("part") for part in message.parts] == ["message", "end"]


STEP = VerifyStep(Delta(0, ()), RowKind.SUPPORT, 2, (np.array([3, 8]),), True, True)
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
PROPOSAL = Proposal(
    7,
    (5, 2),
    (SparseDistribution(np.array([5, 1]), np.array([0.5, 0.5])),) * 2,
    np.ones(2, np.float32),
    StepCost(0.5, 3, 9),
)


def corrupted(block: Message, fields: list[str], name: str, content: bytes) -> None:
    """Replace one column of a block or of one of its parts."""
    owners = [block, *(getattr(block, field) for field in fields)]
    owner = next(each for each in owners if name in each.DESCRIPTOR.fields_by_name)
    setattr(owner, name, content)


CONTENTS = st.one_of(st.binary(max_size=64), st.lists(st.integers(-2, 3), max_size=16).map(
    lambda values: np.array(values, "<i4").tobytes()
))  # fmt: skip
TARGET_COLUMNS = [
    "row_counts",
    *(field.name for field in target_pb2.RowColumns.DESCRIPTOR.fields),
    *("sequences", "base_lengths", "cost_seconds", "cost_sequence_counts", "cost_token_counts"),
]
DRAFT_COLUMNS = [
    *("token_counts", "token_ids", "token_logits"),
    *(field.name for field in draft_pb2.DistributionColumns.DESCRIPTOR.fields),
    *("sequences", "base_lengths", "cost_seconds", "cost_sequence_counts", "cost_token_counts"),
]


@settings(deadline=None)
@given(name=st.sampled_from(TARGET_COLUMNS), content=CONTENTS)
def test_a_corrupted_column_of_a_target_is_refused_or_has_the_requested_shape(
    name: str, content: bytes
) -> None:
    answer = target.verification_to_proto(VERIFICATION, with_columns=True)
    message = target.many_to_proto(as_columns([answer] * 3))
    corrupted(message.columns[0], ["answers", "rows"], name, content)
    try:
        found = [
            target.verification_from_proto(each.answer, STEP) for each in target.columns_from_proto(message)
        ]
    except ProtocolError:
        return
    for verification in found:
        assert len(verification.rows) == STEP.row_count
        for row, size in zip(verification.rows, (2, 0), strict=True):
            assert isinstance(row, SupportRow)
            assert len(row.token_ids) == len(row.probs) == size


@settings(deadline=None)
@given(name=st.sampled_from(DRAFT_COLUMNS), content=CONTENTS)
def test_a_corrupted_column_of_a_draft_is_refused_or_is_a_proposal(name: str, content: bytes) -> None:
    message = draft.many_to_proto(as_columns([draft.proposal_to_proto(PROPOSAL, with_columns=True)] * 3))
    corrupted(message.columns[0], ["answers", "distributions"], name, content)
    try:
        found = [draft.answer_from_proto(each.answer) for each in draft.columns_from_proto(message)]
    except ProtocolError:
        return
    for proposal in found:
        assert isinstance(proposal, Proposal)
        assert len(proposal.distributions) in (0, len(proposal))
        for distribution in proposal.distributions:
            assert isinstance(distribution, SparseDistribution)
            assert abs(distribution.probs.sum() - 1.0) < 1e-9


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("row_counts", b"\2\0\0\0", r"counts of \[2\] for 3 sequences; there must be one count for each"),
        ("row_counts", b"\2\0\0\0\2\0\0\0\1\0\0\0", "their sum must be the number of values"),
        (
            "row_counts",
            b"\xff\xff\xff\xff" * 3,
            "the column of counts names a size of -1; it must be at least 0",
        ),
        ("sequences", b"\1", "the column of sequences holds 1 bytes; it must hold 8 for each sequence"),
        ("base_lengths", b"", "the column of base lengths holds 0 bytes; it must hold 12 for 3 values"),
        ("probabilities", b"\0", "the column of support rows holds 1 bytes; it must hold 24 for 6 values"),
        ("logits", b"\0", "the column of logits holds 1 bytes; it must hold 24 for 6 values"),
        ("support_sizes", b"\0", "the column of support sizes holds 1 bytes; it must hold 0 for 0 values"),
    ],
)
def test_columns_that_do_not_fit_together_are_refused_in_a_sentence(
    name: str, content: bytes, words: str
) -> None:
    answer = target.verification_to_proto(VERIFICATION, with_columns=True)
    message = target.many_to_proto(as_columns([answer] * 3))
    corrupted(message.columns[0], ["answers", "rows"], name, content)
    with pytest.raises(ProtocolError, match=words):
        list(target.columns_from_proto(message))


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (
            replace(STEP, row_kind=RowKind.TOKEN, supports=()),
            "support_rows came where token rows were requested",
        ),
        (replace(STEP, row_count=3), "2 rows came for 3 that were requested"),
        (
            replace(STEP, supports=(np.arange(3),)),
            "a support row holds 8 bytes; it must hold 12 for 3 values",
        ),
    ],
)
def test_columns_that_answer_another_step_are_refused_as_rows_are(step: VerifyStep, words: str) -> None:
    for with_columns in (False, True):
        answer = target.verification_to_proto(VERIFICATION, with_columns=with_columns)
        with pytest.raises(ProtocolError, match=words):
            target.verification_from_proto(answer, step)
