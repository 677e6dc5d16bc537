"""A completion ends at its limit, and drops the tokens past its end."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tokenizers import AddedToken, Tokenizer

from tandem.errors import InvalidRequestError, ProtocolError
from tandem.model.types import (
    Acceptance,
    Chunk,
    DenseRow,
    FinishReason,
    Float32Array,
    GenerationRequest,
    NextToken,
    Proposal,
    SamplingParams,
    SparseDistribution,
    Summary,
    SupportRow,
    TargetRow,
    TokenRow,
    Verification,
)
from tandem_coordinator.decoding.completion import (
    Completion,
    Detokenizer,
    Limits,
    StopStrings,
    ThinkSpans,
    think_spans,
)
from tandem_coordinator.decoding.logprobs import details_of, token_logprobs
from tests.paths import DEMO_TARGET

TOKENIZER = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
EOS = 0
STOP_ID = 40


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text).ids)


def completion(max_length: int = 100, max_tokens: int = 50, **limits: Any) -> Completion:
    """The completion of a prompt of two tokens, with a token that ends it beside the end of the sequence."""
    stop_strings = StopStrings(limits.pop("stop", ()), included=limits.pop("included", False))
    ends = {"eos_token_ids": {EOS}, "stop_token_ids": {STOP_ID}}
    made = Limits(max_length, max_tokens, **(ends | limits))
    return Completion((5, 6), made, Detokenizer(TOKENIZER), stop_strings, "r", 3)


def extend(target: Completion, proposed: tuple[int, ...], accepted: int, next_token: int = 7) -> Chunk:
    kind = NextToken.BONUS if accepted == len(proposed) else NextToken.RECOVERED
    return target.extend(Proposal(target.length, proposed), Acceptance(accepted, next_token, kind))


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_completion_goes_on_after_what_was_delivered(cut: int) -> None:
    """Stop strings and characters may lie across the place where a stream broke."""
    ids = ids_of("é = äß # stop here, not there\n")
    whole = completion(stop=("stop here",))
    rest = completion(stop=("stop here",))
    chunks = []
    for token_id in ids:
        chunks.append(extend(whole, (), 0, token_id))
        if not whole.can_extend:
            break
    assert whole.finish_reason is FinishReason.STOP
    assert cut < len(chunks)
    rest.go_on_after(ids[:cut])
    for before, token_id in zip(chunks[cut:], ids[cut:], strict=False):
        after = extend(rest, (), 0, token_id)
        assert after.text == before.text
    assert (rest.finish_reason, rest.token_ids) == (whole.finish_reason, whole.token_ids)
    with pytest.raises(InvalidRequestError, match="nothing is left"):
        completion(stop=("stop here",)).go_on_after(ids)


def test_a_chunk_is_marked_if_its_proposal_was_drafted_ahead() -> None:
    target = completion()
    acceptance = Acceptance(1, 7, NextToken.BONUS)
    assert target.extend(Proposal(2, (10,)), acceptance, ahead=True).drafted_ahead
    assert not target.extend(Proposal(4, (10,)), acceptance).drafted_ahead


def test_what_a_grammar_forces_was_proposed_by_nobody() -> None:
    chunk = completion().extend(Proposal(2, (10, 11)), Acceptance(2, 7, NextToken.BONUS), is_forced=True)
    assert (chunk.token_ids, chunk.proposed, chunk.drafted) == ((10, 11, 7), 0, (False,) * 3)


def test_a_rule_may_supply_no_token() -> None:
    target = completion()
    chunk = target.extend(Proposal(2, (10, 11)), Acceptance(2, -1, NextToken.NONE))
    assert chunk.token_ids == (10, 11)


def summary_of(chunk: Chunk) -> Summary:
    assert chunk.summary is not None
    return chunk.summary


A = ids_of("a")
CD = ids_of("cd")


@pytest.mark.parametrize(
    ("limits", "proposed", "kept", "text", "reason"),
    [
        ({}, (*A, STOP_ID, 12), 2, "a", STOP_ID),
        ({"included": True}, (*A, STOP_ID), 2, "a" + TOKENIZER.decode([STOP_ID]), STOP_ID),
        ({"eos_token_ids": ()}, (EOS, STOP_ID), 2, "", STOP_ID),
        ({}, (EOS,), 1, "", None),
        ({"max_tokens": 1}, (EOS,), 1, "", None),
        ({"stop_token_ids": {EOS}}, (EOS,), 1, "", None),
        ({"stop": ("cd",)}, (*A, *CD, 12), 1 + len(CD), "a", "cd"),
        ({"stop": ("cd",), "included": True}, (*A, *CD, 12), 1 + len(CD), "acd", "cd"),
    ],
)
def test_stop_tokens_and_strings_end_the_completion(
    limits: dict[str, Any], proposed: tuple[int, ...], kept: int, text: str, reason: int | str | None
) -> None:
    chunk = extend(completion(**limits), proposed, len(proposed))
    assert (chunk.token_ids, chunk.text) == (proposed[:kept], text)
    assert (summary_of(chunk).finish_reason, summary_of(chunk).stop_reason) == (FinishReason.STOP, reason)


def test_only_a_limit_ends_a_completion_before_min_tokens() -> None:
    target = completion(min_tokens=3, stop=("cd",))
    (c,) = ids_of("c")
    (d,) = ids_of("d")
    chunk = extend(target, (c, d, STOP_ID), 3, next_token=EOS)
    assert chunk.token_ids == (c, d, STOP_ID, EOS)
    assert chunk.text.startswith("cd"), "the stop string began too early to count"
    assert summary_of(chunk).completion_tokens == 4
    assert summary_of(extend(completion(min_tokens=1), (STOP_ID, STOP_ID, 10), 3)).completion_tokens == 2


def test_held_back_text_is_emitted_when_a_limit_ends_the_completion() -> None:
    target = completion(stop=("cd",), max_tokens=1)
    (token_id,) = ids_of("c")
    assert extend(target, (), 0, next_token=token_id).text == "c"


def pieces_of(token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER)
    return [detokenizer.push(token_id) for token_id in token_ids] + [detokenizer.finish()]


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


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("ab", max_size=5), max_size=10),
)
def test_stop_strings_agree_with_searching_the_whole_text(stop: list[str], pieces: list[str]) -> None:
    stop_strings = StopStrings(stop)
    text = ""
    for piece in pieces:
        text += stop_strings.push(piece)
        if stop_strings.found is not None:
            break
    text += stop_strings.finish()
    whole = "".join(pieces)
    found = [start for string in stop if (start := whole.find(string)) >= 0]
    assert (stop_strings.found is not None) == bool(found)
    if not found:
        assert text == whole
    else:
        # A stop string that begins earlier may be completed by a later piece than one that begins after it: the
        # stream ends at the first that is complete.
        assert whole.startswith(text)
        assert not any(string in text for string in stop)
        assert any(whole[len(text) :].startswith(string) for string in stop)


START = 8
END = 9


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
def test_spans_of_a_stream_equal_those_of_the_whole(rounds: list[tuple[list[int], list[int]]]) -> None:
    spans = ThinkSpans(START, END)
    committed: list[int] = []
    for added, proposed in rounds:
        committed += added
        assert spans.inside(committed, proposed) == ThinkSpans(START, END).inside(committed, proposed)


@pytest.mark.parametrize(("start", "end"), [("<think>", "</think>"), ("[THINK]", "[/THINK]")])
def test_the_markers_are_the_tokenizers(start: str, end: str) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    assert think_spans(tokenizer) is None
    tokenizer.add_special_tokens([AddedToken(start), AddedToken(end)])
    spans = think_spans(tokenizer)
    assert spans is not None
    start_id = tokenizer.token_to_id(start)
    assert start_id is not None
    assert spans.inside([1, start_id], [1]) == [True]


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
    details = details_of(GenerationRequest("", logprobs=1), SamplingParams())
    assert details is not None
    chunk = Chunk("", (2, 3), (True, False), (0, 0))
    kept = Acceptance(1, 3, NextToken.RECOVERED)
    chunk = details(chunk, Proposal(5, (2, 1)), Verification(5, rows), kept)
    assert [position.top_token_ids for position in chunk.logprobs] == [(2,), (0,)]
    assert [position.logprob for position in chunk.logprobs] == pytest.approx([0.0, -50.0])


def test_dropped_tokens_have_no_logprobs() -> None:
    row = DenseRow(np.zeros(4, np.float32))
    details = details_of(GenerationRequest("", logprobs=0), SamplingParams())
    assert details is not None
    kept = Acceptance(2, 3, NextToken.BONUS)
    chunk = Chunk("", (2,), (True,), (0,))
    chunk = details(chunk, Proposal(5, (2, 1)), Verification(5, (row, row, row)), kept)
    assert len(chunk.logprobs) == 1


def test_a_request_that_wants_to_know_nothing_of_its_tokens_costs_nothing() -> None:
    assert details_of(GenerationRequest(""), SamplingParams()) is None


def test_probabilities_are_those_of_proposal_and_rows_as_far_as_these_say() -> None:
    ids = np.array([2, 5])
    drawn = tuple(SparseDistribution(ids, np.array(probs)) for probs in ([0.25, 0.75], [0.5, 0.5]))
    inside = SupportRow(ids, np.array([0.125, 0.5]), 0.375, 9, None, 0.25)
    outside = TokenRow(7)
    past = SupportRow(np.array([], np.int64), np.array([]), 1.0, 4, None, 0.5)

    def recorded(proposal: Proposal, rows: tuple[TargetRow, ...], kept: Acceptance) -> Chunk:
        details = details_of(GenerationRequest("", probabilities=True), SamplingParams())
        assert details is not None
        tokens = kept.accepted_count + 1
        chunk = Chunk("", (0,) * tokens, (True,) * tokens, (0,) * tokens)
        return details(chunk, proposal, Verification(5, rows), kept)

    proposal = Proposal(5, (5, 2), drawn)
    chunk = recorded(proposal, (inside, inside, past), Acceptance(2, 4, NextToken.BONUS))
    assert chunk.draft_probs == pytest.approx((0.75, 0.5, math.nan), nan_ok=True), (
        "behind it there is no draft"
    )
    assert chunk.target_probs == pytest.approx((0.5, 0.125, 0.5))
    chunk = recorded(proposal, (inside, inside, past), Acceptance(0, 9, NextToken.RECOVERED))
    assert (chunk.draft_probs, chunk.target_probs) == ((0.0,), (0.25,)), "a token outside the draft's support"
    chunk = recorded(Proposal(5, (7,)), (outside, outside), Acceptance(1, 7, NextToken.BONUS))
    assert [*map(math.isnan, chunk.draft_probs + chunk.target_probs)] == [True] * 4, "only ids travelled"
    dense = DenseRow(np.log(np.array([0.1, 0.2, 0.7], np.float32)))
    chunk = recorded(Proposal(5), (dense,), Acceptance(0, 2, NextToken.BONUS))
    assert chunk.target_probs == pytest.approx((0.7,))


def test_a_row_without_logits_is_the_targets_fault() -> None:
    with pytest.raises(ProtocolError, match="without logits"):
        token_logprobs(Verification(5, (TokenRow(1),)), [1], 0)
