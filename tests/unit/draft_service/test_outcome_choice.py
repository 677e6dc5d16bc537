"""Outcomes are chosen by their probability, which is learned from observed outcomes."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from draft_service.proposers.ahead import OutcomeHistory, Ranking

PROPOSED = (1, 2)


def ranking(*confidences: float) -> Ranking:
    """Two proposed tokens and the token after them; each row's own token first, and two others."""
    scores = [math.log(0.7), math.log(0.2), math.log(0.1)]
    return Ranking([[1, 11, 12], [2, 21, 22], [31, 32, 33]], [scores] * 3, confidences)


def test_a_confident_draft_ranks_the_whole_proposal_first_and_an_unsure_one_a_rejection() -> None:
    history = OutcomeHistory()
    assert history.likeliest(PROPOSED, ranking(0.99, 0.99), 1) == [(2, 31)]
    assert history.likeliest(PROPOSED, ranking(0.02, 0.99), 1) == [(0, 11)]
    assert history.likeliest(PROPOSED, ranking(0.99, 0.02), 1) == [(1, 21)]


def test_without_a_proposal_only_next_tokens_are_ranked() -> None:
    alone = Ranking([[5, 6]], [[0.0, -1.0]], ())
    assert OutcomeHistory().likeliest((), alone, 4) == [(0, 5), (0, 6)]


def test_a_rejected_token_does_not_follow_its_own_rejection() -> None:
    found = OutcomeHistory().likeliest(PROPOSED, ranking(0.5, 0.5), 99)
    assert (0, 1) not in found
    assert (1, 2) not in found
    assert set(found) == {(0, 11), (0, 12), (1, 21), (1, 22), (2, 31), (2, 32), (2, 33)}


def test_a_token_without_any_probability_is_not_drafted_for() -> None:
    scores = [0.0, -math.inf]
    found = OutcomeHistory().likeliest((1,), Ranking([[1, 11], [31, 32]], [scores, scores], (0.9,)), 9)
    assert found == [(1, 31)]


def test_it_learns_that_confident_tokens_are_rejected() -> None:
    history, sure = OutcomeHistory(), ranking(0.99, 0.99)
    for _ in range(200):
        history.came(PROPOSED, sure, 0, 12)
    found = history.likeliest(PROPOSED, sure, 9)
    assert found[0] == (0, 12), "the less likely of two, which came each time"
    assert found.index((0, 12)) < found.index((2, 31))


def test_it_learns_that_doubtful_tokens_are_accepted() -> None:
    history, unsure = OutcomeHistory(), ranking(0.02, 0.02)
    assert history.likeliest(PROPOSED, unsure, 1) == [(0, 11)]
    for _ in range(200):
        history.came(PROPOSED, unsure, 2, 31)
    assert history.likeliest(PROPOSED, unsure, 1) == [(2, 31)]


def test_old_text_is_forgotten() -> None:
    """The counts are bounded: a change of text shows within as many rounds as the one before lasted."""
    history, sure = OutcomeHistory(), ranking(0.99, 0.99)
    for _ in range(20_000):
        history.came(PROPOSED, sure, 2, 31)
    for _ in range(4_000):
        history.came(PROPOSED, sure, 0, 11)
    assert history.likeliest(PROPOSED, sure, 1) == [(0, 11)]


shares = st.floats(0.0, 1.0)


@st.composite
def rankings(draw: st.DrawFn) -> tuple[tuple[int, ...], Ranking]:
    proposed = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    rows = len(proposed) + 1
    width = draw(st.integers(1, 4))
    ids = [draw(st.permutations(range(10)))[:width] for _ in range(rows)]
    falling = st.lists(st.floats(-20.0, 0.0), min_size=width, max_size=width)
    scores = [sorted(draw(falling), reverse=True) for _ in range(rows)]
    return proposed, Ranking(ids, scores, [draw(shares) for _ in proposed])


@given(
    rankings(),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=12),
    st.integers(0, 20),
)
def test_the_first_of_many_are_those_of_few_distinct_and_possible(
    case: tuple[tuple[int, ...], Ranking], came: list[tuple[int, int]], count: int
) -> None:
    proposed, own = case
    history = OutcomeHistory()
    for accepted, token_id in came:
        history.came(proposed, own, min(accepted, len(proposed)), token_id)
    everything = history.likeliest(proposed, own, 999)
    assert history.likeliest(proposed, own, count) == everything[:count]
    assert len(set(everything)) == len(everything)
    for accepted, token_id in everything:
        assert token_id in own.token_ids[accepted]
        assert accepted == len(proposed) or token_id != proposed[accepted]
    for accepted in range(len(proposed) + 1):
        places = [own.token_ids[accepted].index(t) for a, t in everything if a == accepted]
        if not came:
            assert places == sorted(places), "at first a row's candidates come in their own order"
