"""Messages of coordinator, services, clients and administrators survive the wire; those that do not fit are refused."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any, TypeVar

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from tandem.config.origin import Origin
from tandem.errors import InvalidRequestError, ProtocolError
from tandem.model.admin import ConfigOption, CoordinatorState, Diagnosis
from tandem.model.replica import ReplicaState, Role
from tandem.model.speculation_state import DecidingFigure, SpeculationState
from tandem.model.types import (
    AcceptanceTerms,
    AheadBudget,
    AheadStats,
    Cancel,
    Chunk,
    Delta,
    DenseRow,
    DraftedOutcomes,
    DraftOptions,
    EngineStatistics,
    Finish,
    FinishReason,
    GenerationRequest,
    GoesOn,
    Grammar,
    GrammarKind,
    IntArray,
    LogitAdjustments,
    Pending,
    PositionStats,
    Proposal,
    ProposeStep,
    RequestTiming,
    RowKind,
    RowLogprobs,
    RowStatistics,
    SamplingParams,
    SparseDistribution,
    SpeculationStats,
    StepCost,
    Summary,
    SupportRow,
    TargetOptions,
    TargetRow,
    TokenHistogram,
    TokenLogprobs,
    TokenRow,
    Verification,
    VerifyStep,
)
from tandem.v1 import draft_pb2, generation_pb2, target_pb2, types_pb2
from tandem.wire import admin, common, draft, generation, target
from tandem.wire.common import statistics_from_proto, statistics_to_proto
from tandem.wire.status import Ending
from tandem_coordinator.transport.streams import RemoteSequence
from tests.unit.coordinator.cli.samples import FINDINGS, NOW, REPLICAS, REQUEST, STATS, STATUS

FLOATS = st.floats(0.0, 1.0, width=32)
IDS = st.integers(0, 2**31 - 1)
COSTS = st.one_of(
    st.none(), st.builds(StepCost, st.floats(2**-12, 100.0, width=32), st.integers(1, 8), st.integers(8, 99))
)
MessageT = TypeVar("MessageT", bound=Message)


def plain(value: object) -> object:
    """Arrays as types and bytes, so that equal means equal bits."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return type(value).__name__, [plain(getattr(value, name)) for name in value.__dataclass_fields__]
    return value


def corrupted(data: st.DataObject, message: MessageT) -> MessageT:
    """Take something away from the message, or put something else in its place, in whichever of its parts."""
    owner, field = data.draw(st.sampled_from([*_set_fields(message)]))
    match data.draw(st.sampled_from(("clear", "shorten", "change"))):
        case "shorten" if field.is_repeated:
            del getattr(owner, field.name)[-1]
        case "change" if field.message_type is None:
            value = _value(data, field)
            if field.is_repeated:
                getattr(owner, field.name)[data.draw(st.integers(0, len(getattr(owner, field.name)) - 1))] = (
                    value
                )
            else:
                setattr(owner, field.name, value)
        case _:
            owner.ClearField(field.name)
    return message


def _set_fields(message: Message) -> Iterator[tuple[Message, FieldDescriptor]]:
    for field, value in message.ListFields():
        yield message, field
        if field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                yield from _set_fields(part)


def _value(data: st.DataObject, field: FieldDescriptor) -> object:
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return data.draw(st.floats(width=32))
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return data.draw(st.booleans())
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return data.draw(st.binary() if field.type == FieldDescriptor.TYPE_BYTES else st.text())
    return data.draw(st.sampled_from([-1, 0, 1, 2, 3, 7, 2**31 - 1, -(2**31)]))


LENGTHS = st.integers(0, 2**30)


@st.composite
def sparse(draw: st.DrawFn) -> SparseDistribution:
    weights = np.array(draw(st.lists(st.integers(1, 100), min_size=1, max_size=6)), float)
    ids = draw(st.lists(IDS, min_size=len(weights), max_size=len(weights), unique=True))
    # What binary32 leaves of the probabilities is their share.
    probs = (weights / weights.sum()).astype(np.float32).astype(float)
    return SparseDistribution(np.array(ids), probs / sum(probs.tolist()))


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    token_ids = tuple(draw(st.lists(IDS, max_size=4)))
    distributions = tuple(draw(sparse()) for _ in token_ids) if draw(st.booleans()) else ()
    has_logits = bool(token_ids) and draw(st.booleans())
    logits = np.array([draw(FLOATS) for _ in token_ids], np.float32) if has_logits else None
    return Proposal(draw(LENGTHS), token_ids, distributions, logits, draw(COSTS))


@st.composite
def outcomes(draw: st.DrawFn) -> DraftedOutcomes:
    token_ids = tuple(draw(st.lists(st.integers(-1, 2**31 - 1), max_size=4)))
    depth = draw(st.integers(0, 3))
    count = len(token_ids) if depth == 0 else 0
    keys = [tuple(draw(st.lists(IDS, min_size=count, max_size=count))) for _ in range(2)]
    distributions = tuple(draw(sparse()) for _ in token_ids) if draw(st.booleans()) else ()
    lead = tuple(draw(st.lists(IDS, max_size=3)))
    length, cost = draw(LENGTHS), draw(COSTS)
    return DraftedOutcomes(length, depth, token_ids, keys[0], keys[1], distributions, lead, cost)


@given(st.lists(st.one_of(proposals(), outcomes()), max_size=6))
def test_proposals_and_outcomes_survive(made: list[draft.Answer]) -> None:
    numbered = dict(enumerate(made, 1))
    message = draft.answers_to_proto(numbered.items())
    back = draft_pb2.ProposeResponse.FromString(message.SerializeToString())
    found = dict(draft.answers_from_proto(back))
    expected = {number: _once_rounded(each) for number, each in numbered.items()}
    assert plain(found) == plain(expected)


def _once_rounded(answer: draft.Answer) -> draft.Answer:
    """The probabilities as a reader has them: rounded to binary32, and then divided by their sum."""
    supports = []
    for each in answer.distributions:
        assert isinstance(each, SparseDistribution)
        probs = each.probs.astype(np.float32).astype(float)
        supports.append(SparseDistribution(each.token_ids, probs / sum(probs.tolist())))
    return replace(answer, distributions=tuple(supports))


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
    if not count:
        kind = RowKind.TOKEN  # that of no rows
    with_statistics = kind is RowKind.SUPPORT and draw(st.booleans())
    supports: tuple[IntArray, ...] = ()
    rows: tuple[TargetRow, ...] = tuple(TokenRow(draw(IDS)) for _ in range(count))
    if kind is RowKind.SUPPORT:
        supports = tuple(np.arange(draw(st.integers(0, 5))) for _ in range(count))
        rows = tuple(draw(support_rows(each, with_statistics=with_statistics)) for each in supports)
    if kind is RowKind.DENSE:
        rows = tuple(DenseRow(np.array([draw(FLOATS), draw(FLOATS)], np.float32)) for _ in range(count))
    proposal = max(count - 1, 0)
    delta = Delta(draw(IDS), tuple(draw(st.lists(IDS, min_size=proposal, max_size=proposal + 3))))
    lead = draw(st.integers(0, 8)), draw(IDS), draw(st.booleans())
    step = VerifyStep(delta, kind, count, supports, with_statistics, *lead, serial=draw(IDS))
    if count == 1 and delta.token_ids:
        step.own_tokens = draw(st.none() | st.integers(0, 128))
    proposal_of_its_own = draw(st.none() | proposals())
    goes_on = draw(st.none() | following())
    labels = draw(IDS), draw(IDS)
    length, cost = draw(st.integers(0, 2**30)), draw(COSTS)
    logprobs = tuple(draw(st.lists(row_logprobs(), max_size=3)))
    return step, Verification(length, rows, cost, proposal_of_its_own, goes_on, *labels, logprobs=logprobs)


@st.composite
def row_logprobs(draw: st.DrawFn) -> RowLogprobs:
    doubles = st.floats(max_value=0.0, allow_nan=False)
    count = draw(st.integers(0, 3))
    return RowLogprobs(
        tuple(draw(st.lists(IDS, min_size=count, max_size=count))),
        tuple(draw(st.lists(doubles, min_size=count, max_size=count))),
        tuple(draw(st.lists(doubles, max_size=3))),
        tuple(draw(st.lists(doubles, max_size=3))),
        tuple(draw(st.lists(doubles, max_size=3))),
    )


@st.composite
def following(draw: st.DrawFn) -> GoesOn:
    """A step that a target announces, with a proposal that is given or its own head's."""
    own_tokens = draw(st.none() | st.integers(0, 128))
    count = 1 if own_tokens is not None else draw(st.integers(1, 3))
    token_ids = tuple(draw(st.lists(IDS, min_size=count, max_size=count)))
    return GoesOn(Delta(draw(IDS), token_ids), own_tokens)


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
    expected = {number: _own_once_rounded(answer) for number, answer in answers}
    assert plain(found) == plain(expected)


def _own_once_rounded(answer: Verification) -> Verification:
    if answer.proposal is None:
        return answer
    proposal = _once_rounded(answer.proposal)
    assert isinstance(proposal, Proposal)
    return replace(answer, proposal=proposal)


SAMPLING = SamplingParams(0.7, 20, 0.9, 0.05, -(2**62), 1.3, -0.5, 2.0)
"""In double precision: with binary32 the target would warp with another temperature than the coordinator."""
BUDGET = AheadBudget(4, 3)
DRAFTED = DraftOptions(
    "r", SAMPLING, 99, "00-aa-bb-01", "a client", "a scope", 0, None, RowKind.SUPPORT, 32, True, BUDGET
)
VERIFIED = TargetOptions(
    "r",
    SAMPLING,
    99,
    "00-aa-bb-01",
    "a client",
    "a scope",
    17,
    None,
    LogitAdjustments({3: 0.1, 5: -100.0}, 4, (0, 7), (1, 2, 3), ((4,), (5, 6))),
    (2, 9),
    AcceptanceTerms("typical-acceptance", 0.25, 0.5),
    7,
    3,
)
LIVES: list[tuple[Any, list[tuple[int, object]]]] = [
    (draft, [
        (1, DRAFTED), (2, replace(DRAFTED, ahead=None)), (1, ProposeStep(Delta(0, [4, 5]), 6)),
        (1, ProposeStep(Delta(2, [6]), 0, AheadBudget(2, 1), 1)), (2, ProposeStep(Delta(0, []), 0)),
        (1, Finish(2)), (2, Cancel()),
    ]),
    (target, [
        (1, VERIFIED), (2, replace(VERIFIED, adjustments=LogitAdjustments())),
        (1, VerifyStep(Delta(0, [4]), RowKind.TOKEN, 1)), (2, VerifyStep(Delta(3, []), RowKind.TOKEN, 0)),
        (1, VerifyStep(Delta(1, [5]), RowKind.TOKEN, 1, lead=2, min_proposed=3, alone_after_miss=True)),
        (1, Finish(2)), (2, Cancel()), (3, DraftedOutcomes(7, 0, (4, 5), (1, 0), (8, 9), lead_token_ids=(6,))),
        (4, DraftedOutcomes(9, 2, (4,))),
    ]),
]  # fmt: skip
"""A coordinator's messages about its sequences to each service."""


@pytest.mark.parametrize(("wire", "said"), LIVES, ids=["draft", "target"])
def test_a_sequence_s_whole_life_survives_in_one_message(wire: Any, said: list[tuple[int, object]]) -> None:
    assert plain(list(wire.requests_from_proto(wire.requests_to_proto(said)))) == plain(said)
    ends = [(1, Ending()), (2, Ending(Ending().code, "why", 0.5))]
    assert list(wire.answers_from_proto(wire.answers_to_proto(ends))) == ends


def test_pending_steps_survive() -> None:
    pending = [(1, Pending(7, is_waiting=False)), (2, Pending(1, is_waiting=True))]
    message = target.answers_to_proto(pending)
    assert list(target.answers_from_proto(message)) == pending


PLAIN = SamplingParams()
OF_DRAFTS: list[tuple[draft.Request, str]] = [
    (DraftOptions("r", PLAIN, draft_top_k=-1), "draft_top_k is -1"),
    (DraftOptions("r", PLAIN, draft_support_mass=1.5), "draft_support_mass is 1.5"),
    (DraftOptions("r", PLAIN, draft_support_mass=math.nan), "draft_support_mass is nan"),
    (DraftOptions("r", PLAIN, ahead=AheadBudget(1000, 1)), "branch_count of the budget is 1000"),
    (ProposeStep(Delta(-1, []), 0), "committed.base_length is -1"),
    (ProposeStep(Delta(0, [1]), -1), "max_tokens is -1"),
    (ProposeStep(Delta(0, [1]), 2, AheadBudget(1, -1)), "token_count of the budget is -1"),
    (ProposeStep(Delta(0, [1]), 0, BUDGET, 1), "draft_ahead.token_ids are 1 tokens behind no committed one"),
]
OF_TARGETS: list[tuple[target.Request, str]] = [
    (TargetOptions("r", PLAIN, prompt_length=-1), "prompt_token_count is -1"),
    (TargetOptions("r", PLAIN, adjustments=LogitAdjustments(min_tokens=-1)), "min_tokens is -1"),
    (
        TargetOptions("r", PLAIN, adjustments=LogitAdjustments(forbidden_sequences=((),))),
        "holds an empty one",
    ),
    (TargetOptions("r", PLAIN, adjustments=LogitAdjustments({3: 1e6})), "the bias of token 3 is 1e"),
    (TargetOptions("r", PLAIN, adjustments=LogitAdjustments({3: math.nan})), "token 3 is nan"),
    (VerifyStep(Delta(0, [1]), RowKind.TOKEN, 1, lead=9), "lead.credits is 9"),
    (VerifyStep(Delta(0, [1]), RowKind.TOKEN, 1, serial=-1), "serial is -1"),
    (VerifyStep(Delta(0, [1]), RowKind.TOKEN, 1, own_tokens=-1), "own_head.max_tokens is -1"),
    (
        TargetOptions("r", PLAIN, acceptance=AcceptanceTerms("r", 1.5)),
        "epsilon is 1.5; it must be from 0 to 1",
    ),
    (TargetOptions("r", PLAIN, acceptance=AcceptanceTerms("r", math.nan)), "epsilon is nan"),
    (TargetOptions("r", PLAIN, acceptance=AcceptanceTerms("r", 0.1, math.inf)), "delta is inf"),
    (VerifyStep(Delta(-1, [1]), RowKind.TOKEN, 1), "committed.base_length is -1"),
    (VerifyStep(Delta(0, [1]), RowKind.SUPPORT, 1, (np.arange(3),) * 2), "2 supports came for 1 rows"),
    (DraftedOutcomes(7, 64, (4,)), "outcomes came at depth"),
    (DraftedOutcomes(7, -1, (4,)), "outcomes came at depth"),
    (DraftedOutcomes(7, 60, (4,), lead_token_ids=(1,) * 4), "outcomes came at depth"),
    (DraftedOutcomes(7, 0, (4,) * 65, (1,) * 65, tuple(range(65))), "outcomes came at depth"),
]


@pytest.mark.parametrize(
    ("wire", "request_", "words"), [*((draft, *each) for each in OF_DRAFTS), *((target, *each) for each in OF_TARGETS)]
)  # fmt: skip
def test_an_impossible_request_is_refused(wire: Any, request_: object, words: str) -> None:
    [(number, error)] = wire.requests_from_proto(wire.requests_to_proto([(1, request_)]))
    assert number == 1
    assert isinstance(error, InvalidRequestError)
    assert words in str(error)


def support(ids: list[int], probs: list[float]) -> SparseDistribution:
    return SparseDistribution(np.array(ids, np.int64), np.array(probs))


def test_distributions_come_for_every_token_or_none() -> None:
    message = draft.answers_to_proto([(1, Proposal(3, (1, 2), (support([1], [1.0]),)))])
    [(number, error)] = draft.answers_from_proto(message)
    assert number == 1
    assert str(error).startswith("2 tokens came with 1 distributions")


SUPPORTS = (support([5, 1], [0.5, 0.5]),) * 2
PROPOSAL = Proposal(7, (5, 2), SUPPORTS, np.ones(2, np.float32), StepCost(0.5, 3, 9))
OUTCOMES = DraftedOutcomes(7, 0, (3, 4), (0, 2), (8, 9), SUPPORTS, (), StepCost(0.5, 3, 9))


@given(st.data())
def test_corrupted_proposals_and_outcomes_are_refused_or_whole(data: st.DataObject) -> None:
    answers: list[draft.Answer] = [PROPOSAL, PROPOSAL, PROPOSAL, OUTCOMES, OUTCOMES]
    message = corrupted(data, draft.answers_to_proto(zip((1, 2, 3, 1, 3), answers, strict=True)))
    try:
        found = [answer for _, answer in draft.answers_from_proto(message)]
    except ProtocolError:
        return
    for answer in found:
        if not isinstance(answer, Proposal | DraftedOutcomes):
            assert isinstance(answer, ProtocolError | Ending)
            continue
        assert len(answer.distributions) in (0, len(answer.token_ids))
        for each in answer.distributions:
            total = each.probs.sum()
            assert abs(total - 1.0) < 1e-9 or not common.sums_to_one(total)


STEP = VerifyStep(Delta(3, (7, 9)), RowKind.SUPPORT, 2, (np.array([3, 8]),), with_statistics=True)
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
def test_corrupted_rows_are_refused_or_have_the_requested_shape(data: st.DataObject) -> None:
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
def test_corrupted_requests_are_refused_or_are_steps(data: st.DataObject) -> None:
    for wire, steps in (
        (draft, [ProposeStep(Delta(4, [5, 6]), 0, BUDGET, 1), ProposeStep(Delta(4, [5]), 3, BUDGET)]),
        (target, [STEP, replace(STEP, lead=2)]),
    ):
        message = corrupted(data, wire.requests_to_proto(list(enumerate(steps, 1))))
        with suppress(ProtocolError):
            for _, found in wire.requests_from_proto(message):
                assert isinstance(found, ProposeStep | VerifyStep | InvalidRequestError)
                assert not isinstance(found, VerifyStep) or len(found.supports) <= found.row_count


MISSING: list[tuple[Any, object, tuple[str, ...], str]] = [
    (draft, DRAFTED, ("open",), "a part has no content; it must hold open, step, finish or cancel"),
    (draft, DRAFTED, ("open", "sampling"), "open.sampling is missing"),
    (draft, ProposeStep(Delta(0, [4]), 2), ("step", "committed"), "step.committed is missing"),
    (draft, ProposeStep(Delta(0, [4]), 2), ("step", "propose"), "step.question (propose or draft_ahead) is missing"),
    (draft, ProposeStep(Delta(0, [4]), 0, BUDGET), ("step", "draft_ahead", "ahead"), "draft_ahead.ahead is missing"),
    (target, VERIFIED, ("open",), "a part has no content; it must hold open, step, outcomes, finish or cancel"),
    (target, VERIFIED, ("open", "sampling"), "open.sampling is missing"),
    (target, VerifyStep(Delta(0, [4]), RowKind.TOKEN, 1), ("step", "committed"), "step.committed is missing"),
    (target, VerifyStep(Delta(0, [4]), RowKind.TOKEN, 1), ("step", "given"), "step.proposal (given or own_head)"),
    (target, VerifyStep(Delta(0, [4, 5]), RowKind.TOKEN, 2), ("step", "rows"), "1 tokens and asks for no rows"),
]  # fmt: skip


@pytest.mark.parametrize(("wire", "request_", "path", "words"), MISSING)
def test_a_part_that_is_missing_is_named(
    wire: Any, request_: object, path: tuple[str, ...], words: str
) -> None:
    message = wire.requests_to_proto([(1, request_)])
    *way, last = path
    owner: Any = message.parts[0]
    for name in way:
        owner = getattr(owner, name)
    owner.ClearField(last)
    [(number, error)] = wire.requests_from_proto(message)
    assert number == 1
    assert isinstance(error, InvalidRequestError)
    assert words in str(error)


def test_answers_that_lack_a_part_are_errors_of_their_own_sequence() -> None:
    message = target.answers_to_proto([(1, VERIFICATION), (2, VERIFICATION), (3, VERIFICATION)])
    message.parts[0].ClearField("verification")
    message.parts[1].verification.goes_on.base_length = 5
    (_, empty), (_, half), (_, whole) = target.answers_from_proto(message)
    assert str(empty) == "a part has no content; it must hold verification, pending or ending"
    assert str(half) == "goes_on.proposal (given or own_head) is missing; it must be set"
    assert isinstance(whole, target.Answer)
    drafted = draft.answers_to_proto([(1, PROPOSAL), (2, OUTCOMES), (3, PROPOSAL)])
    drafted.parts[0].ClearField("proposal")
    drafted.parts[1].outcomes.continuations[0].ClearField("outcome")
    (_, nothing), (_, torn), (_, proposal) = draft.answers_from_proto(drafted)
    assert str(nothing) == "a part has no content; it must hold proposal, outcomes or ending"
    assert str(torn).startswith("continuations.outcome is missing in 1 of 2")
    assert isinstance(proposal, Proposal)


@pytest.mark.parametrize("number", [0, -1])
def test_a_part_of_no_sequence_is_an_error_of_the_stream(number: int) -> None:
    for wire, request_, answer in ((draft, DRAFTED, PROPOSAL), (target, VERIFIED, VERIFICATION)):
        with pytest.raises(ProtocolError, match=f"a part's sequence is {number}; sequences count from 1"):
            list(wire.requests_from_proto(wire.requests_to_proto([(number, request_)])))
        with pytest.raises(ProtocolError, match=f"a part's sequence is {number}; sequences count from 1"):
            list(wire.answers_from_proto(wire.answers_to_proto([(number, answer)])))


def test_what_is_not_set_has_a_good_default() -> None:
    """A client that sets nothing but what must be set."""
    opening = draft_pb2.ProposeOpen(sampling=types_pb2.SamplingParams())
    step = draft_pb2.ProposeStep(committed=types_pb2.Delta(token_ids=[4]), propose=draft_pb2.Propose())
    message = draft_pb2.ProposeRequest()
    message.parts.add(sequence=1, open=opening)
    message.parts.add(sequence=1, step=step)
    greedy = SamplingParams(temperature=0.0)
    assert list(draft.requests_from_proto(message)) == [
        (1, DraftOptions("", greedy)),
        (1, ProposeStep(Delta(0, (4,)), 0)),
    ]
    asked = target_pb2.VerifyRequest()
    asked.parts.add(sequence=1, open=target_pb2.VerifyOpen(sampling=types_pb2.SamplingParams()))
    verify = target_pb2.VerifyStep(
        committed=types_pb2.Delta(token_ids=[4]), given=types_pb2.TokenIds(), rows=target_pb2.RowRequest()
    )
    asked.parts.add(sequence=1, step=verify)
    assert list(target.requests_from_proto(asked)) == [
        (1, TargetOptions("", greedy)),
        (1, VerifyStep(Delta(0, (4,)), RowKind.TOKEN, 1)),
    ]
    info = common.model_info_from_proto(types_pb2.ModelInfo())
    assert info.tensor_parallel_size == 1


def test_unknown_fields_are_passed_over() -> None:
    """Also in a part, and one that a later version adds."""
    message = draft.requests_to_proto([(1, ProposeStep(Delta(0, [4]), 2))])
    step = message.parts[0].step
    unknown = b"\xc2\x3e\x03new"  # field 1000, three bytes
    step.MergeFromString(unknown)
    message.MergeFromString(unknown)
    again = draft_pb2.ProposeRequest.FromString(message.SerializeToString())
    assert list(draft.requests_from_proto(again)) == [(1, ProposeStep(Delta(0, (4,)), 2))]


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (replace(STEP, row_kind=RowKind.TOKEN, supports=()), "support_rows came where token_rows were"),
        (replace(STEP, row_count=3), "2 rows came for 3 that were requested"),
        (replace(STEP, supports=(np.arange(3),)), "a support row of 2 ids came for a support of 3"),
    ],
)
def test_an_answer_to_another_step_is_refused(step: VerifyStep, words: str) -> None:
    (_, answer), *_ = target.answers_from_proto(answers())
    assert isinstance(answer, target.Answer)
    with pytest.raises(ProtocolError, match=words):
        answer.verification(step)


@pytest.mark.parametrize(
    ("sampling", "names"),
    [
        (SamplingParams(5e-324), {"temperature"}),
        (SamplingParams(-1.0), {"temperature"}),
        (SamplingParams(float("nan")), {"temperature"}),
        (SamplingParams(float("inf")), {"temperature"}),
        (SamplingParams(top_k=-1), {"top_k"}),
        (SamplingParams(top_p=0.0), {"top_p"}),
        (SamplingParams(top_p=1.5, min_p=2.0), {"top_p", "min_p"}),
        (SamplingParams(repetition_penalty=-1.0), {"repetition_penalty"}),
        (SamplingParams(frequency_penalty=3, presence_penalty=-3), {"frequency_penalty", "presence_penalty"}),
    ],
)
def test_sampling_out_of_range_is_refused_for_all_reasons(sampling: SamplingParams, names: set[str]) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        common.sampling_from_proto(common.sampling_to_proto(sampling))
    assert {sentence.partition(" is ")[0] for sentence in str(refusal.value).split("; ")[::2]} == names


@pytest.mark.parametrize(
    ("data_type", "data"),
    [
        (types_pb2.DATA_TYPE_FLOAT16, np.array([1.5, -2.0], dtype="<f2").tobytes()),
        (types_pb2.DATA_TYPE_BFLOAT16, bytes.fromhex("c03f00c0")),
        (types_pb2.DATA_TYPE_FLOAT32, np.array([1.5, -2.0], dtype="<f4").tobytes()),
    ],
)
def test_logits_of_every_type(data_type: types_pb2.DataType.ValueType, data: bytes) -> None:
    tensor = types_pb2.Tensor(data_type=data_type, shape=[1, 2], data=data)
    assert common.logits_from_tensor(tensor, "rows").tolist() == [[1.5, -2.0]]


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (
            types_pb2.Tensor(data_type=types_pb2.DATA_TYPE_FLOAT32, shape=[2, 3], data=b"1234"),
            "holds 4 bytes; its shape \\(2, 3\\) needs 24",
        ),
        (
            types_pb2.Tensor(data_type=types_pb2.DATA_TYPE_FLOAT32, shape=[-1, -2], data=b"12345678"),
            "has the shape \\[-1, -2\\] of 2 dimensions",
        ),
        (
            types_pb2.Tensor(data_type=types_pb2.DATA_TYPE_FLOAT32, shape=[1] * 70, data=b"1234"),
            "has the shape \\[1, 1, 1, 1\\] of 70 dimensions",
        ),
        (
            types_pb2.Tensor(data_type=types_pb2.DATA_TYPE_FLOAT32, shape=[1 << 30, 0], data=b""),
            "be rows times vocabulary, at least 1 each",
        ),
        (
            types_pb2.Tensor(data_type=types_pb2.DATA_TYPE_FLOAT32, shape=[1 << 30, 1 << 30], data=b""),
            "holds 0 bytes; its shape",
        ),
        (types_pb2.Tensor(shape=[1, 1], data=b"12"), "has data type 0"),
    ],
)
def test_impossible_tensors_are_refused(tensor: types_pb2.Tensor, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        common.logits_from_tensor(tensor, "dense_rows")


YEARS = replace(STATS.speculation, rounds=1 << 40, drafted=1 << 42)
DOCUMENTS: list[tuple[Any, object]] = [
    *((admin.STATUS, replace(STATUS, state=state)) for state in CoordinatorState),
    *(
        (admin.REPLICA, replace(shot, role=role, state=state, model=None if state is ReplicaState.DOWN else shot.model))
        for shot, role, state in product(REPLICAS, Role, ReplicaState)
    ),
    (admin.REQUEST, REQUEST),
    (admin.STATS, replace(STATS, completion_tokens=1 << 43, speculation=YEARS)),
    *(
        (admin.OPTION, ConfigOption("name", value, origin, True, "10.0.0.7:1", NOW))
        for origin, value in product(Origin, (None, 6, 1.0, True, "strict", [0.9, 0.5]))
    ),
    (admin.DIAGNOSIS, Diagnosis("0.1.0", NOW, FINDINGS)),
]  # fmt: skip


@pytest.mark.parametrize(("form", "document"), DOCUMENTS)
def test_what_administrators_see_comes_back(form: Any, document: object) -> None:
    back = form.from_proto(form.to_proto(document))
    assert back == document
    if isinstance(document, ConfigOption):
        assert type(back.value) is type(document.value)


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


def test_rounds_are_as_small_as_documented() -> None:
    """`greedy` and `strict`; `residual` and `block`, with supports of the usual size."""
    assert round_bytes(RowKind.TOKEN, (TokenRow(VOCABULARY_SIZE - 1),) * (TOKEN_COUNT + 1)) <= 160
    support = np.arange(VOCABULARY_SIZE - MEAN_SUPPORT, VOCABULARY_SIZE)
    row = SupportRow(support, np.full(MEAN_SUPPORT, 1 / VOCABULARY_SIZE), 0.9, 7)
    bonus = SupportRow(np.array([], dtype=np.int64), np.array([]), 1.0, VOCABULARY_SIZE - 1)
    rows = (*[row] * TOKEN_COUNT, bonus)
    assert round_bytes(RowKind.SUPPORT, rows, (support,) * TOKEN_COUNT) <= 6 * 1024


@pytest.mark.parametrize(
    "request_",
    [
        GenerationRequest("text"),
        GenerationRequest("x", repetition_penalty=0.0, frequency_penalty=0.0, presence_penalty=0.0),
        GenerationRequest("x", repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.5),
        GenerationRequest(""),
        GenerationRequest(()),
        GenerationRequest(
            (1, 2), max_tokens=0, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, stop=("a", "b"),
            num_speculative_tokens=3, rejection_sampling_strategy="strict", speculation=False, row_kind=RowKind.DENSE,
            ignore_eos=True, logprobs=0,
        ),
        GenerationRequest(
            "x", logit_bias={3: -100.0, 0: 0.1}, min_tokens=4, stop_token_ids=(7, 9), include_stop_str_in_output=True,
            max_tokens_must_fit=True, probabilities=True, sampled_logprobs=True,
            grammar=Grammar(GrammarKind.JSON_SCHEMA, "{}"),
        ),
    ],
)  # fmt: skip
def test_requests_distinguish_unset_from_zero(request_: GenerationRequest) -> None:
    assert generation.request_from_proto(generation.request_to_proto(request_)) == request_


def test_a_request_without_a_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="the request has no prompt; set text or token_ids"):
        generation.request_from_proto(generation_pb2.GenerateRequest())


@pytest.mark.parametrize("stop_reason", [None, "", "END", 0, 7])
@pytest.mark.parametrize("finish_reason", list(FinishReason))
def test_chunks_survive(finish_reason: FinishReason, stop_reason: str | int | None) -> None:
    positions = [PositionStats(2, 2, 2), PositionStats(2, 2, 1)]
    stats = SpeculationStats(2, 5, 3, positions, AheadStats(2, 1, [0, 1], 0.125))
    state = SpeculationState(False, 0, "why", (DecidingFigure("with the draft", 95.25, "tokens/s"),))
    sampling = SamplingParams(0.2, 5, 0.9, 0.1, -5, 1.1, 0.5, -0.5)
    timing = RequestTiming(0.5, None, 0.25)
    summary = Summary(
        finish_reason, 4, 9, stats, "id", -5, state, stop_reason=stop_reason, sampling=sampling, timing=timing
    )
    chunk = Chunk(
        "héllo", (1, 2), (True, False), (2, 3), summary, 4,
        (TokenLogprobs(-0.5, (1, 7), (-0.5, -1.25)), TokenLogprobs(-2.0)), drafted_ahead=True,
        draft_probs=(0.5, 0.25), target_probs=(0.75, 1.0), raw_logprobs=(-0.5, -2.0),
        processed_logprobs=(-0.25, -float("inf")),
    )  # fmt: skip
    assert generation.chunk_from_proto(generation.chunk_to_proto(chunk)) == chunk
    assert generation.chunk_from_proto(generation.chunk_to_proto(Chunk("", (), (), ()))).summary is None


@pytest.mark.parametrize("name", ["vocabulary_size", "max_length", "tensor_parallel_size"])
def test_a_model_of_a_negative_size_is_refused(name: str) -> None:
    message = types_pb2.ModelInfo()
    setattr(message, name, -1)
    with pytest.raises(ProtocolError, match=f"{name} of the model is -1; it must be at least 0"):
        common.model_info_from_proto(message)


ENGINE_STATISTICS = EngineStatistics(1024, 256, 64, True, 50, 20, TokenHistogram((8, 100), (3, 1, 0), 40))


def test_statistics_of_an_engine_survive_the_way() -> None:
    assert statistics_from_proto(statistics_to_proto(ENGINE_STATISTICS)) == ENGINE_STATISTICS


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"upper_bounds": (8,)}, "step_tokens has 3 counts for 1 upper_bounds; it must have one more"),
        (
            {"upper_bounds": (8, 8)},
            "upper_bounds of step_tokens do not ascend; each must be above the one before",
        ),
        ({"counts": (3, -1, 0)}, "a number of the engine's statistics is -1; it must be at least 0"),
        (
            {"upper_bounds": tuple(range(65)), "counts": (0,) * 66},
            "step_tokens has 65 upper_bounds; it must have at most 64",
        ),
    ],
)
def test_statistics_that_no_engine_has_are_refused(changes: dict[str, Any], sentence: str) -> None:
    false = replace(ENGINE_STATISTICS, step_tokens=replace(ENGINE_STATISTICS.step_tokens, **changes))
    with pytest.raises(ProtocolError, match=re.escape(sentence)):
        statistics_from_proto(statistics_to_proto(false))


def test_a_service_need_not_count_its_steps() -> None:
    message = statistics_to_proto(ENGINE_STATISTICS)
    message.ClearField("step_tokens")
    assert statistics_from_proto(message) == replace(ENGINE_STATISTICS, step_tokens=TokenHistogram())


def test_a_negative_number_is_refused() -> None:
    message = statistics_to_proto(replace(ENGINE_STATISTICS, reserved_tokens=-5))
    with pytest.raises(ProtocolError, match="is -5; it must be at least 0"):
        statistics_from_proto(message)
