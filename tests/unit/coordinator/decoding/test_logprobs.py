"""Log probabilities of committed tokens, from dense rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coordinator.decoding.logprobs import LogprobsRecorder, token_logprobs
from tandem.errors import ProtocolError
from tandem.types import (
    Acceptance,
    Chunk,
    DenseRow,
    Float32Array,
    NextToken,
    Proposal,
    TokenRow,
    Verification,
)

LOGITS = arrays(np.float32, 12, elements=st.floats(-30, 30, width=32))


@given(LOGITS, st.integers(0, 11), st.integers(0, 20))
def test_logprobs_are_those_of_the_distribution_and_top_tokens_come_first(
    logits: Float32Array, token_id: int, count: int
) -> None:
    (position,) = token_logprobs(Verification(3, (DenseRow(logits),)), [token_id], count)
    (everything,) = token_logprobs(Verification(3, (DenseRow(logits),)), [token_id], 12)
    assert np.exp(everything.top_logprobs).sum() == pytest.approx(1.0)
    assert (
        position.logprob
        == dict(zip(everything.top_token_ids, everything.top_logprobs, strict=True))[token_id]
    )
    by_hand = sorted(range(12), key=lambda i: (-logits[i], i))
    assert position.top_token_ids == tuple(by_hand[:count])
    assert position.top_logprobs == everything.top_logprobs[:count]


def test_each_kept_token_is_looked_up_in_its_own_row() -> None:
    rows = tuple(DenseRow(np.eye(4, dtype=np.float32)[i] * 50) for i in (2, 0, 1))
    recorder = LogprobsRecorder(1)
    accept = recorder.recording(lambda proposal, verification: Acceptance(1, 3, NextToken.RECOVERED))
    accept(Proposal(5, (2, 1)), Verification(5, rows))
    chunk = recorder.added_to(Chunk("", (2, 3), (True, False), (0, 0)))
    assert [position.top_token_ids for position in chunk.logprobs] == [(2,), (0,)]
    assert [position.logprob for position in chunk.logprobs] == pytest.approx([0.0, -50.0])


def test_dropped_tokens_have_no_logprobs() -> None:
    row = DenseRow(np.zeros(4, np.float32))
    recorder = LogprobsRecorder(0)
    accept = recorder.recording(lambda proposal, verification: Acceptance(2, 3, NextToken.BONUS))
    accept(Proposal(5, (2, 1)), Verification(5, (row, row, row)))
    assert len(recorder.added_to(Chunk("", (2,), (True,), (0,))).logprobs) == 1


def test_a_row_without_logits_is_the_targets_fault() -> None:
    with pytest.raises(ProtocolError, match="without logits"):
        token_logprobs(Verification(5, (TokenRow(1),)), [1], 0)
