"""A completion ends at its limit, and drops the tokens past its end."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from coordinator.decoding.completion import Completion, Limits
from coordinator.decoding.detokenization import Detokenizer, StopStrings
from tandem.types import Acceptance, Chunk, FinishReason, NextToken, Proposal, Summary
from tests.paths import DEMO_TARGET

TOKENIZER = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
EOS = 0


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text).ids)


def completion(
    prompt: tuple[int, ...] = (5, 6),
    *,
    max_length: int = 100,
    max_tokens: int = 50,
    stop: tuple[str, ...] = (),
) -> Completion:
    return Completion(
        prompt,
        Limits(max_length, max_tokens, {EOS}),
        Detokenizer(TOKENIZER),
        StopStrings(stop),
        request_id="r",
        seed=3,
    )


def extend(target: Completion, proposed: tuple[int, ...], accepted: int, next_token: int = 7) -> Chunk:
    kind = NextToken.BONUS if accepted == len(proposed) else NextToken.RECOVERED
    return target.extend(Proposal(target.length, proposed), Acceptance(accepted, next_token, kind))


def test_accepted_tokens_and_the_next_one_are_committed() -> None:
    target = completion()
    chunk = extend(target, (10, 11, 12), 2, next_token=20)
    assert target.token_ids == [5, 6, 10, 11, 20]
    assert chunk.token_ids == (10, 11, 20)
    assert chunk.drafted == (True, True, False)
    assert sum(chunk.text_lengths) == len(chunk.text)
    assert chunk.summary is None
    assert target.can_extend


def test_a_chunk_is_marked_if_its_proposal_was_drafted_ahead() -> None:
    target, acceptance = completion(), Acceptance(1, 7, NextToken.BONUS)
    assert target.extend(Proposal(2, (10,), outcome_rank=0), acceptance).drafted_ahead
    assert not target.extend(Proposal(4, (10,)), acceptance).drafted_ahead


def test_a_rule_may_supply_no_token() -> None:
    target = completion()
    chunk = target.extend(Proposal(2, (10, 11)), Acceptance(2, -1, NextToken.NONE))
    assert chunk.token_ids == (10, 11)


def test_tokens_after_an_end_of_sequence_inside_the_accepted_run_are_dropped() -> None:
    target = completion()
    chunk = extend(target, (10, EOS, 12), 3)
    assert target.token_ids == [5, 6, 10, EOS]
    assert chunk.token_ids == (10, EOS)
    assert chunk.summary is not None
    assert chunk.summary.finish_reason is FinishReason.STOP
    assert chunk.summary.completion_tokens == 2
    assert (chunk.summary.speculation.drafted, chunk.summary.speculation.accepted) == (3, 2)
    assert not target.can_extend


def test_end_of_sequence_can_be_ignored() -> None:
    target = Completion(
        (5,), Limits(100, 50), Detokenizer(TOKENIZER), StopStrings(()), request_id="r", seed=0
    )
    extend(target, (EOS,), 1)
    assert target.can_extend


@pytest.mark.parametrize(("max_length", "max_tokens"), [(5, 50), (100, 3)])
def test_a_limit_inside_the_accepted_run_ends_the_completion(max_length: int, max_tokens: int) -> None:
    target = completion(max_length=max_length, max_tokens=max_tokens)
    assert target.room == 3
    chunk = extend(target, (10, 11, 12, 13), 4)
    assert target.token_ids == [5, 6, 10, 11, 12]
    assert target.room == 0
    assert chunk.summary is not None
    assert chunk.summary.finish_reason is FinishReason.LENGTH


def test_an_end_of_sequence_at_the_limit_is_a_stop() -> None:
    chunk = extend(completion(max_tokens=1), (EOS,), 1)
    assert chunk.summary is not None
    assert chunk.summary.finish_reason is FinishReason.STOP


def test_a_stop_string_ends_text_and_tokens() -> None:
    target = completion(stop=("cd",))
    token_ids = ids_of("ab") + ids_of("c") + ids_of("d") + ids_of("zz")
    chunk = extend(target, token_ids, len(token_ids))
    assert chunk.text == "ab"
    assert TOKENIZER.decode(target.token_ids[2:]) == "abcd", (
        "the token that completes the stop string is the last"
    )
    assert chunk.summary is not None
    assert chunk.summary.finish_reason is FinishReason.STOP


STOP_ID = 40


def ending(**limits: Any) -> Completion:
    """Return a completion with a stop token id and further options."""
    stop_strings = StopStrings(limits.pop("stop", ()), included=limits.pop("included", False))
    made = Limits(100, 50, **({"eos_token_ids": {EOS}, "stop_token_ids": {STOP_ID}} | limits))
    return Completion((5, 6), made, Detokenizer(TOKENIZER), stop_strings, request_id="r", seed=0)


def summary_of(chunk: Chunk) -> Summary:
    assert chunk.summary is not None
    return chunk.summary


def test_a_stop_token_ends_the_completion_before_its_text() -> None:
    chunk = extend(ending(), (10, STOP_ID, 12), 3)
    assert chunk.token_ids == (10, STOP_ID)
    assert chunk.text == TOKENIZER.decode([10])
    assert (summary_of(chunk).finish_reason, summary_of(chunk).stop_reason) == (FinishReason.STOP, STOP_ID)


def test_the_stop_token_can_be_included() -> None:
    chunk = extend(ending(included=True), (10, STOP_ID), 2)
    assert chunk.text == TOKENIZER.decode([10, STOP_ID])


def test_ignoring_the_end_of_sequence_leaves_the_stop_tokens() -> None:
    chunk = extend(ending(eos_token_ids=()), (EOS, STOP_ID), 2)
    assert chunk.token_ids == (EOS, STOP_ID)
    assert summary_of(chunk).stop_reason == STOP_ID


def test_an_end_of_sequence_has_no_stop_reason() -> None:
    assert summary_of(extend(ending(), (EOS,), 1)).stop_reason is None
    assert summary_of(extend(ending(stop_token_ids={EOS}), (EOS,), 1)).stop_reason is None


def test_the_stop_string_can_be_included() -> None:
    token_ids = ids_of("ab") + ids_of("cd") + ids_of("zz")
    chunk = extend(ending(stop=("cd",), included=True), token_ids, len(token_ids))
    assert chunk.text == "abcd"
    assert summary_of(chunk).stop_reason == "cd"


def test_only_a_limit_ends_a_completion_before_min_tokens() -> None:
    target = ending(min_tokens=3, stop=("cd",))
    (c,), (d,) = ids_of("c"), ids_of("d")
    chunk = extend(target, (c, d, STOP_ID), 3, next_token=EOS)
    assert chunk.token_ids == (c, d, STOP_ID, EOS)
    assert chunk.text.startswith("cd"), "the stop string began too early to count"
    assert summary_of(chunk).completion_tokens == 4
    assert summary_of(extend(ending(min_tokens=1), (STOP_ID, STOP_ID, 10), 3)).completion_tokens == 2


def test_held_back_text_is_emitted_when_a_limit_ends_the_completion() -> None:
    target = completion(stop=("cd",), max_tokens=1)
    (token_id,) = ids_of("c")
    assert extend(target, (), 0, next_token=token_id).text == "c"


def test_a_character_cut_off_by_the_limit_is_left_out_of_the_text_only() -> None:
    token_ids = ids_of("日")
    target = completion(max_tokens=len(token_ids) - 1)
    chunk = extend(target, token_ids, len(token_ids))
    assert chunk.text == ""
    assert chunk.token_ids == token_ids[:-1]
