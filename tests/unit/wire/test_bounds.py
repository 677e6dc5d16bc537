"""Counts that would take all memory are refused."""

from __future__ import annotations

import pytest

from tandem.errors import InvalidRequestError
from tandem.v1 import draft_pb2
from tandem.wire.draft import MOST_PROPOSED_TOKENS, step_from_proto


@pytest.mark.parametrize("count", [-1, MOST_PROPOSED_TOKENS + 1, 2**31 - 1])
def test_a_count_of_proposed_tokens_has_bounds(count: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"token_count is {count}; it must be in 0..65536"):
        step_from_proto(draft_pb2.ProposeStep(token_count=count))


def test_the_most_are_taken() -> None:
    step = draft_pb2.ProposeStep(token_count=MOST_PROPOSED_TOKENS)
    assert step_from_proto(step).token_count == MOST_PROPOSED_TOKENS
