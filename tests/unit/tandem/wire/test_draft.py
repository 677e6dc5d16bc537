"""Draft options, steps and proposals survive a trip over the wire; impossible proposals are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import ProtocolError
from tandem.types import (
    Delta,
    DenseLogits,
    DraftOptions,
    IntArray,
    Proposal,
    ProposeStep,
    RowKind,
    SamplingParams,
    SparseDistribution,
)
from tandem.v1 import draft_pb2
from tandem.wire import draft

SAMPLING = SamplingParams(0.7, 20, 0.9, 0.05, -(2**62))


def ids(*values: int) -> IntArray:
    return np.array(values, dtype=np.int64)


def test_options_and_steps_survive() -> None:
    options = DraftOptions("r", SAMPLING, 99, RowKind.SUPPORT, 32, True, "00-aa-bb-01")
    assert draft.options_from_proto(draft.options_to_proto(options).open) == options
    step = ProposeStep(Delta(3, [4, 5]), 6)
    assert draft.step_from_proto(draft.step_to_proto(step).step) == step
    assert draft.finish_to_proto().WhichOneof("message") == "finish"


@given(st.lists(st.integers(0, 2**31 - 1), max_size=8))
def test_deterministic_proposals_survive(token_ids: list[int]) -> None:
    back = draft.proposal_from_proto(draft.proposal_to_proto(Proposal(7, tuple(token_ids))))
    assert (back.base_length, back.token_ids, back.distributions) == (7, tuple(token_ids), ())
    assert back.token_logits is None


def test_proposals_with_distributions_survive() -> None:
    sparse = SparseDistribution(ids(5, 9), np.array([0.75, 0.25]))
    dense = DenseLogits(np.array([0.5, -1.0, 3.0], dtype=np.float32))
    logits = np.array([1.5, -2.5], dtype=np.float32)
    back = draft.proposal_from_proto(draft.proposal_to_proto(Proposal(7, (5, 2), (sparse, dense), logits)))
    first, second = back.distributions
    assert isinstance(first, SparseDistribution)
    assert first.token_ids.tolist() == [5, 9]
    assert first.probs.tolist() == [0.75, 0.25]
    assert isinstance(second, DenseLogits)
    assert second.logits.tolist() == [0.5, -1.0, 3.0]
    assert back.token_logits is not None
    assert back.token_logits.tolist() == [1.5, -2.5]


def sparse_message(token_ids: list[int], probs: list[float]) -> draft_pb2.ProposeResponse:
    data = np.array(probs, dtype="<f4").tobytes()
    distribution = draft_pb2.SparseDistribution(token_ids=token_ids, probabilities=data)
    return draft_pb2.ProposeResponse(
        token_ids=[1], distributions=[draft_pb2.DraftDistribution(sparse=distribution)]
    )


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (sparse_message([1, 2], [0.5, 0.2]), "sums to 0.7"),
        (sparse_message([1, 2], [1.5, -0.5]), "with nothing below 0"),
        (sparse_message([1, 2], [float("nan"), 0.5]), "sums to nan"),
        (sparse_message([1, 1], [0.5, 0.5]), "names a token twice"),
        (sparse_message([1, 2], [1.0]), "holds 4 bytes; it must hold 8 for 2 values"),
        (sparse_message([], []), "sums to 0"),
        (
            draft_pb2.ProposeResponse(token_ids=[1, 2], distributions=[draft_pb2.DraftDistribution()]),
            "a proposal of 2 tokens came with 1 distributions",
        ),
        (draft_pb2.ProposeResponse(token_ids=[1], token_logits=b"abc"), "token_logits holds 3 bytes"),
    ],
)
def test_impossible_proposals_are_refused(message: draft_pb2.ProposeResponse, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        draft.proposal_from_proto(message)
