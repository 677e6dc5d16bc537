"""Rounds of the study of a head on a device of its own, played by hand; and what the demo's head foresees."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.pairs import DEMO, held_out_prompts
from benchmarks.studies.remote_head import (
    DEPTH,
    RANKED,
    Clock,
    Pair,
    Ranks,
    RemoteHeadSettings,
    Text,
    play_apart,
    play_in_turns,
    play_residual,
    with_ideal_states,
)
from models.demo.recipe.corpus import load_tokenizer
from tandem.config.settings import load_settings
from tandem.drafting.repeats import Odds
from tests.heads import Eagle3Reference

CLOCK = Clock(target=10.0, head=1.0, way=0.5, between=0.0)
PROMPT = 3
TOKENS = 40


def text_with(rank_of: Callable[[int, int], int]) -> Text:
    """A text that never repeats itself, whose token at base + depth + 2 has this rank with the head."""
    token_ids = list(range(1000, 1000 + PROMPT + TOKENS + 2 * DEPTH + 2))
    ranked = np.tile(np.arange(RANKED), (len(token_ids) - DEPTH - 1, DEPTH, 1))
    for base, depth in np.ndindex(ranked.shape[:2]):
        if (rank := rank_of(base, depth)) < RANKED:
            ranked[base, depth, rank] = token_ids[base + depth + 2]
    flags = (ranked[..., 0] >= 1000).tolist()
    return Text(token_ids, PROMPT, PROMPT + TOKENS, ranked, flags)


RIGHT = text_with(lambda *_: 0)
WRONG = text_with(lambda *_: RANKED)


def apart(text: Text, count: int, outcomes: int = 4, **terms: Any) -> tuple[int, float]:
    play = partial(play_apart, text, count, CLOCK, Ranks([text]), outcomes=outcomes)
    return play(**terms)


@pytest.mark.parametrize("play", [play_in_turns, play_residual])
def test_a_head_beside_the_target_is_paid_for_in_each_round(play: Callable[..., tuple[int, float]]) -> None:
    assert play(RIGHT, 3, CLOCK.beside) == (40, 10 * 13.0)
    assert play(WRONG, 3, CLOCK.beside) == (40, 40 * 13.0)
    assert play(RIGHT, 3, CLOCK.ask) == (40, 10 * 14.0)


def test_a_head_apart_that_is_always_right_costs_the_first_question_alone() -> None:
    """A question for 2 tokens makes 3; then 9 passes while the target works: one reads, 4 follow, 4 go on."""
    tokens, milliseconds = apart(RIGHT, 4)
    assert (tokens, milliseconds) == (3 + 8 * 5, 13.0 + 8 * 10.0)


def test_proposals_are_shorter_where_the_time_ends() -> None:
    """9 passes are there. Behind 6 accepted tokens the head begins so late that 2 are ready, and behind 2 again 6."""
    assert apart(RIGHT, 8) == (3 + 7 + 3 + 7 + 3 + 7 + 3 + 7, 13.0 + 7 * 10.0)


@pytest.mark.parametrize(
    ("terms", "round_ms"), [({}, 13.0), ({"after_miss": 0}, 10.0), ({"is_beside_as_well": True}, 12.0)]
)
def test_a_miss_costs_a_question_or_a_round_alone_or_passes_beside(
    terms: dict[str, Any], round_ms: float
) -> None:
    assert apart(WRONG, 4, **terms) == (40, 40 * round_ms)


def test_an_outcome_counts_by_its_place_without_the_rejected_token() -> None:
    """Always the second: each proposal is rejected at once, and the head's next guess is the token."""
    second = text_with(lambda *_: 1)
    assert apart(second, 4, outcomes=1) == (40, 13.0 + 39 * 10.0)
    third = text_with(lambda *_: 2)
    assert apart(third, 4, outcomes=1) == (40, 40 * 13.0)


def test_ideal_states_are_as_good_as_the_targets() -> None:
    tired = text_with(lambda _, depth: 0 if depth == 0 else RANKED)
    assert play_in_turns(tired, 3, CLOCK.beside) == (40, 20 * 13.0)
    assert play_in_turns(with_ideal_states(tired), 3, CLOCK.beside) == (40, 10 * 13.0)


def test_text_that_does_not_repeat_itself_is_played_alike_with_lookups() -> None:
    assert apart(RIGHT, 4, odds=Odds()) == apart(RIGHT, 4)
    assert play_in_turns(RIGHT, 4, CLOCK.beside, Odds()) == play_in_turns(RIGHT, 4, CLOCK.beside)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 64))
def test_a_head_apart_is_never_faster_than_rounds_of_the_target(seed: int, count: int, outcomes: int) -> None:
    ranks = np.random.default_rng(seed).geometric(0.5, (PROMPT + TOKENS + 2 * DEPTH, DEPTH)) - 1
    text = text_with(lambda base, depth: int(ranks[base, depth]))
    tokens, milliseconds = apart(text, count, outcomes)
    assert tokens >= TOKENS
    assert milliseconds >= 10.0 * tokens / (count + 2)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair.load()


def test_what_is_foreseen_is_what_the_head_proposes(pair: Pair) -> None:
    """Up to the first token that is not the text's: behind it the head would go on with its own."""
    reference = Eagle3Reference(DEMO / "eagle3", pair.target)
    [(_, beginning)] = held_out_prompts(1)
    prompt = load_tokenizer(DEMO / "target")(beginning)["input_ids"]
    [text] = pair.texts([prompt], 48, 0.0)
    assert text.length == len(prompt) + 48
    for length in range(len(prompt), text.length, 4):
        foreseen = text.proposal(length, 0, 6)
        right = text.count_accepted(length, foreseen) + 1
        assert foreseen[:right] == tuple(reference.propose(text.token_ids[:length], 6))[:right]


def test_a_window_hides_states_of_the_prompt(pair: Pair) -> None:
    [whole], [blind], [wide] = (pair.texts([range(20, 60)], 8, 0.0, window) for window in (None, 0, 40))
    assert whole.token_ids == blind.token_ids
    assert not np.array_equal(blind.ranked[40], whole.ranked[40])
    assert np.array_equal(wide.ranked, whole.ranked)


def test_the_study_reads_its_options() -> None:
    settings = load_settings(RemoteHeadSettings, ["--outcomes", "8,16", "--texts", "4"], "test")
    assert (settings.outcomes, settings.texts, settings.temperatures) == ((8, 16), 4, (0.0, 0.7))
