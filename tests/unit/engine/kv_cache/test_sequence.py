"""Deltas change the tail of a sequence and keep the rest; invalid ones are refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.kv_cache.arena import PageTable
from tandem.engine.kv_cache.sequence import Sequence
from tandem.errors import InvalidRequestError
from tandem.types import Delta


def _sequence(*token_ids: int, max_length: int = 10) -> Sequence:
    """A sequence whose tokens are all computed."""
    sequence = Sequence(PageTable(64, max_length), max_length, vocabulary_size=100)
    sequence.apply(Delta(0, token_ids))
    sequence.advance(len(token_ids))
    return sequence


@pytest.mark.parametrize(
    ("delta", "token_ids", "computed_length"),
    [
        (Delta(3, [4]), [1, 2, 3, 4], 3),  # the usual case
        (Delta(3, [4, 5]), [1, 2, 3, 4, 5], 3),  # everything was accepted, so the cache is one behind
        (Delta(1, [9]), [1, 9], 1),  # a rejection
        (Delta(1, [2, 9]), [1, 2, 9], 2),  # what did not change is kept
        (Delta(0, [1, 2, 3]), [1, 2, 3], 3),  # said again
        (Delta(1, [2, 3, 4]), [1, 2, 3, 4], 3),  # overlaps what is there
        (Delta(2, []), [1, 2], 2),  # only shortens
        (Delta(0, [1, 2]), [1, 2], 2),
        (Delta(0, []), [], 0),
        (Delta(3, []), [1, 2, 3], 3),
    ],
)
def test_a_delta_replaces_the_tail_and_keeps_what_is_equal(
    delta: Delta, token_ids: list[int], computed_length: int
) -> None:
    sequence = _sequence(1, 2, 3)
    sequence.apply(delta)
    assert sequence.token_ids == token_ids
    assert sequence.computed_length == computed_length
    assert sequence.pending_count == len(token_ids) - computed_length


_IDS = st.lists(st.integers(0, 3), max_size=8)


@settings(deadline=None)
@given(before=_IDS, computed=st.integers(0, 8), base_length=st.integers(0, 8), token_ids=_IDS)
def test_kept_tokens_are_always_a_common_prefix(
    before: list[int], computed: int, base_length: int, token_ids: list[int]
) -> None:
    sequence = Sequence(PageTable(64, 64), 20, vocabulary_size=4)
    sequence.apply(Delta(0, before))
    sequence.advance(min(computed, len(before)))
    delta = Delta(min(base_length, len(before)), token_ids)
    sequence.apply(delta)
    kept = sequence.computed_length
    assert sequence.token_ids == before[: delta.base_length] + token_ids
    assert sequence.token_ids[:kept] == before[:kept]
    computed_before = min(computed, len(before))
    could_keep = kept < min(computed_before, sequence.length) and before[kept] == sequence.token_ids[kept]
    assert not could_keep


@pytest.mark.parametrize(
    ("delta", "sentence"),
    [
        (
            Delta(4, [1]),
            "The delta starts at token 4, but the sequence has 3 tokens; send the missing ones from base_length 0.",
        ),
        (
            Delta(-1, [1]),
            "The delta starts at token -1, but the sequence has 3 tokens; send the missing ones from base_length 0.",
        ),
        (Delta(3, [1] * 8), "The sequence would have 11 tokens, but its limit is 10."),
        (Delta(3, [5, 100]), "Token id 100 is not in the vocabulary, whose ids are 0 to 99."),
        (Delta(3, [-1]), "Token id -1 is not in the vocabulary, whose ids are 0 to 99."),
    ],
)
def test_a_delta_that_does_not_fit_changes_nothing(delta: Delta, sentence: str) -> None:
    sequence = _sequence(1, 2, 3)
    with pytest.raises(InvalidRequestError) as raised:
        sequence.apply(delta)
    assert str(raised.value) == sentence
    assert (sequence.token_ids, sequence.computed_length) == ([1, 2, 3], 3)


def test_rows_of_computed_positions_are_run_again() -> None:
    sequence = _sequence(1, 2, 3)
    sequence.want_rows(2)
    assert sequence.computed_length == 1
    with pytest.raises(
        InvalidRequestError, match="Rows were asked for the last 4 positions, but the sequence has 3"
    ):
        sequence.want_rows(4)


def test_append_stops_at_the_limit() -> None:
    sequence = _sequence(1, 2, max_length=3)
    could_extend = sequence.can_extend
    sequence.append(7)
    assert (could_extend, sequence.can_extend) == (True, False)
    with pytest.raises(InvalidRequestError, match="The sequence would have 4 tokens, but its limit is 3"):
        sequence.append(8)
