"""Think spans are followed token by token, through committed and proposed tokens alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from coordinator.decoding.think_spans import ThinkSpans, think_spans
from tests.paths import DEMO_TARGET

START, END = 8, 9


@pytest.mark.parametrize(
    ("committed", "proposed", "inside"),
    [
        ([1, 2], [3, 4], [False, False]),
        ([1, START], [3, 4], [True, True]),
        ([1, START, 2], [3, END, 4], [True, True, False]),
        ([1], [START, 3, END, 4], [False, True, True, False]),
        ([START, 1, END], [2], [False]),
        ([END], [2, START], [False, False]),
        ([START, START, END], [2], [False]),
        ([START], [], []),
    ],
)
def test_spans_are_found_in_every_case_of_the_table(
    committed: list[int], proposed: list[int], inside: list[bool]
) -> None:
    assert ThinkSpans(START, END).inside(committed, proposed) == inside


tokens = st.lists(st.sampled_from([1, START, END]), max_size=6)


@given(st.lists(st.tuples(tokens, tokens), max_size=6))
def test_spans_of_a_streamed_completion_equal_those_of_the_whole(
    rounds: list[tuple[list[int], list[int]]],
) -> None:
    spans = ThinkSpans(START, END)
    committed: list[int] = []
    for added, proposed in rounds:
        committed += added
        assert spans.inside(committed, proposed) == ThinkSpans(START, END).inside(committed, proposed)


def test_the_markers_are_the_tokenizers() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    assert think_spans(tokenizer) is None
    tokenizer.add_special_tokens([AddedToken("<think>"), AddedToken("</think>")])
    spans = think_spans(tokenizer)
    assert spans is not None
    start_id = tokenizer.token_to_id("<think>")
    assert start_id is not None
    assert spans.inside([1, start_id], [1]) == [True]
