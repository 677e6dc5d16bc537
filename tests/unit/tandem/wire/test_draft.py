"""What coordinator and draft say of any number of sequences survives the wire; what does not fit is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import InvalidRequestError, ProtocolError
from tandem.types import (
    AheadBudget,
    Cancel,
    Delta,
    DraftedOutcomes,
    DraftOptions,
    Finish,
    Proposal,
    ProposeStep,
    RowKind,
    SamplingParams,
    SparseDistribution,
    StepCost,
)
from tandem.v1 import draft_pb2
from tandem.wire import draft
from tandem.wire.status import Ending
from tests.unit.tandem.wire.columns import COSTS, FLOATS, IDS, corrupted, plain

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
    token_ids = tuple(draw(st.lists(IDS, max_size=4)))
    depth = draw(st.integers(0, 3))
    keys = [tuple(draw(st.lists(IDS, min_size=3, max_size=3))) if depth == 0 else () for _ in range(2)]
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


def test_a_sequence_s_whole_life_survives_in_one_message() -> None:
    options = DraftOptions(
        "r", SamplingParams(0.7, 20, 0.9, 0.05, -(2**62)), 99, RowKind.SUPPORT, 32, True, "00-aa-bb-01",
        AheadBudget(4, 3), "a client",
    )  # fmt: skip
    said: list[tuple[int, draft.Request]] = [
        (1, options), (2, replace(options, ahead=None)), (1, ProposeStep(Delta(0, [4, 5]), 6)),
        (1, ProposeStep(Delta(2, [6]), 0, AheadBudget(2, 1), 1)), (2, ProposeStep(Delta(0, []), 0)),
        (1, Finish(2)), (2, Cancel()),
    ]  # fmt: skip
    assert plain(list(draft.requests_from_proto(draft.requests_to_proto(said)))) == plain(said)
    ends = [(1, Ending()), (2, Ending(Ending().code, "why", 0.5))]
    assert list(draft.answers_from_proto(draft.answers_to_proto(ends))) == ends


BUDGET = AheadBudget(4, 3)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (DraftOptions("r", SamplingParams(), draft_top_k=-1), "draft_top_k is -1"),
        (DraftOptions("r", SamplingParams(), draft_support_mass=1.5), "draft_support_mass is 1.5"),
        (DraftOptions("r", SamplingParams(), draft_support_mass=math.nan), "draft_support_mass is nan"),
        (DraftOptions("r", SamplingParams(), row_kind=RowKind.DENSE), "row_kind is ROW_KIND_DENSE"),
        (
            DraftOptions("r", SamplingParams(), ahead=AheadBudget(1000, 1)),
            "branch_count of the budget is 1000",
        ),
        (ProposeStep(Delta(-1, []), 0), "delta.base_length is -1"),
        (ProposeStep(Delta(0, [1]), -1), "the proposal size is -1"),
        (ProposeStep(Delta(0, [1]), 2, AheadBudget(1, -1)), "token_count of the budget is -1"),
        (ProposeStep(Delta(0, [1]), 0, BUDGET, 1), "proposed_count is 1; it must be from 0 to below"),
        (ProposeStep(Delta(0, [1, 2]), 1, BUDGET, 1), "one of them must be 0"),
    ],
)
def test_an_impossible_request_is_refused(request_: draft.Request, words: str) -> None:
    [(number, error)] = draft.requests_from_proto(draft.requests_to_proto([(1, request_)]))
    assert number == 1
    assert isinstance(error, InvalidRequestError)
    assert words in str(error)


def support(ids: list[int], probs: list[float]) -> SparseDistribution:
    return SparseDistribution(np.array(ids, np.int64), np.array(probs))


def test_distributions_come_for_every_token_or_none() -> None:
    message = draft.answers_to_proto([(1, Proposal(3, (1, 2), (support([1], [1.0]),)))])
    with pytest.raises(ProtocolError, match="2 tokens came with 1 distributions"):
        list(draft.answers_from_proto(message))


SUPPORTS = (support([5, 1], [0.5, 0.5]),) * 2
PROPOSAL = Proposal(7, (5, 2), SUPPORTS, np.ones(2, np.float32), StepCost(0.5, 3, 9))
OUTCOMES = DraftedOutcomes(7, 0, (3, 4), (0, 2), (8, 9), SUPPORTS, (), StepCost(0.5, 3, 9))


@given(st.data())
def test_corrupted_columns_of_an_answer_are_refused_or_an_answer(data: st.DataObject) -> None:
    answers: list[tuple[int, draft.Answer]] = [
        *((i, PROPOSAL) for i in (1, 2, 3)),
        (1, OUTCOMES),
        (3, OUTCOMES),
    ]
    message = corrupted(data, draft.answers_to_proto(answers))
    try:
        found = [answer for _, answer in draft.answers_from_proto(message)]
    except ProtocolError:
        return
    for answer in found:
        assert not isinstance(answer, Ending)
        assert len(answer.distributions) in (0, len(answer.token_ids))
        for each in answer.distributions:
            total = each.probs.sum()
            assert abs(total - 1.0) < 1e-9 or not draft.sums_to_one(total)


@given(st.data())
def test_corrupted_columns_of_a_request_are_refused_or_steps(data: st.DataObject) -> None:
    steps = [(number, ProposeStep(Delta(4, [5, 6]), 0, BUDGET, 1)) for number in (1, 2, 3)]
    try:
        for _, step in draft.requests_from_proto(corrupted(data, draft.requests_to_proto(steps))):
            assert isinstance(step, ProposeStep | InvalidRequestError)
    except ProtocolError:
        pass
