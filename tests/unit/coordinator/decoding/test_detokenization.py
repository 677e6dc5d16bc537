"""Streamed text consists of whole characters, ends before a stop string, and loses nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from coordinator.decoding.detokenization import Detokenizer, StopStrings
from tests.paths import DEMO_TARGET

TOKENIZER = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
END_OF_TEXT = TOKENIZER.token_to_id("<|endoftext|>")


def pieces_of(token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER)
    return [detokenizer.push(token_id) for token_id in token_ids] + [detokenizer.finish()]


@given(st.text(max_size=40))
def test_the_pieces_add_up_to_the_text_and_none_ends_inside_a_character(text: str) -> None:
    pieces = pieces_of(TOKENIZER.encode(text).ids)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_a_character_cut_off_at_the_end_is_left_out() -> None:
    token_ids = TOKENIZER.encode("x日").ids
    assert len(TOKENIZER.encode("日").ids) > 1, "the case needs a character of several tokens"
    assert "".join(pieces_of(token_ids[:-1])) == "x"


@given(st.lists(st.integers(1, TOKENIZER.get_vocab_size() - 1), max_size=30))
def test_streamed_text_equals_the_text_decoded_at_once(token_ids: list[int]) -> None:
    whole: str = TOKENIZER.decode(token_ids)
    text = "".join(pieces_of(token_ids))
    assert whole.startswith(text)
    assert set(whole[len(text) :]) <= {"\ufffd"}


def test_the_end_of_text_token_adds_no_text() -> None:
    assert END_OF_TEXT is not None
    assert pieces_of([END_OF_TEXT]) == ["", ""]


@pytest.mark.parametrize(
    ("stop", "pieces", "expected"),
    [
        (["END"], ["abc", "END", "x"], "abc"),
        (["END"], ["abE", "N", "Dx"], "ab"),
        (["END"], ["abE", "N", "x"], "abENx"),
        (["END"], ["abEN"], "abEN"),
        (["b", "ab"], ["xab"], "x"),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb"),
        (["aab"], ["aa", "ab"], "a"),
        ([], ["abc"], "abc"),
    ],
)
def test_a_stop_string_ends_the_text_before_it(stop: list[str], pieces: list[str], expected: str) -> None:
    stop_strings = StopStrings(stop)
    text = ""
    for piece in pieces:
        text += stop_strings.push(piece)
        if stop_strings.met:
            break
    assert text + stop_strings.finish() == expected


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("ab", max_size=5), max_size=10),
)
def test_stop_strings_agree_with_searching_the_whole_text(stop: list[str], pieces: list[str]) -> None:
    stop_strings = StopStrings(stop)
    text = ""
    for piece in pieces:
        text += stop_strings.push(piece)
        if stop_strings.met:
            break
    text += stop_strings.finish()
    whole = "".join(pieces)
    found = [start for string in stop if (start := whole.find(string)) >= 0]
    assert stop_strings.met == bool(found)
    if not found:
        assert text == whole
    else:
        # A stop string that begins earlier may be completed by a later piece than one that begins after it: the
        # stream ends at the first that is complete.
        assert whole.startswith(text)
        assert not any(string in text for string in stop)
        assert any(whole[len(text) :].startswith(string) for string in stop)
