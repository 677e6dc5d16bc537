"""Whether drafting pays is decided by measured numbers alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.payoff import (
    FIRST_PAUSE_ROUNDS,
    LONGEST_PAUSE_ROUNDS,
    PROBE_ROUNDS,
    TRIAL_ROUNDS,
    Payoff,
    RoundCost,
    gain,
)

USELESS = RoundCost(was_asked=True, accepted=0, proposing_seconds=0.03, seconds=0.07)
USEFUL = RoundCost(was_asked=True, accepted=4, proposing_seconds=0.03, seconds=0.07)
ALONE = RoundCost(was_asked=False, accepted=0, proposing_seconds=0.0, seconds=0.03)


def feed(payoff: Payoff, cost: RoundCost, most: int) -> int:
    """How many such rounds there were until drafting was paused; `most` when it never was."""
    return next((i for i in range(1, most + 1) if payoff.add(cost)), most)


def sit_out(payoff: Payoff) -> int:
    """How many rounds a pause lasts."""
    rounds = 0
    while payoff.is_paused:
        assert payoff.tokens(4) == 0
        payoff.add(ALONE)
        rounds += 1
    return rounds


@pytest.mark.parametrize(
    ("tokens_per_round", "extending", "expected"),
    [
        (1.0, None, 0.04 / 0.07),
        (5.0, None, 5 * 0.04 / 0.07),
        (5.0, 0.02, 5 * 0.02 / 0.07),
        # Two measurements of the same thing: the target alone is no slower than the target with more to do.
        (1.0, 0.08, 0.04 / 0.07),
    ],
)
def test_the_gain_is_tokens_in_a_time_over_tokens_in_it_without_a_draft(
    tokens_per_round: float, extending: float | None, expected: float
) -> None:
    assert gain(tokens_per_round, 0.03, 0.07, extending) == pytest.approx(expected)


def test_a_useful_draft_is_never_paused() -> None:
    assert feed(Payoff(may_pause=True), USEFUL, 1000) == 1000


def test_a_useless_draft_is_paused_after_a_trial() -> None:
    payoff = Payoff(may_pause=True)
    assert feed(payoff, USELESS, 1000) == TRIAL_ROUNDS
    assert payoff.is_paused
    assert payoff.pause_rounds == FIRST_PAUSE_ROUNDS


def test_one_that_is_late_is_paused_like_one_that_is_wrong() -> None:
    late = RoundCost(was_asked=True, accepted=0, proposing_seconds=0.25, seconds=0.28)
    assert feed(Payoff(may_pause=True), late, 1000) == TRIAL_ROUNDS


def test_nothing_is_paused_that_must_not_be() -> None:
    assert feed(Payoff(may_pause=False), USELESS, 1000) == 1000


def test_a_paused_draft_is_probed_ever_more_rarely() -> None:
    payoff = Payoff(may_pause=True)
    feed(payoff, USELESS, 1000)
    pauses = []
    for _ in range(8):
        pauses.append(sit_out(payoff))
        assert feed(payoff, USELESS, 1000) == PROBE_ROUNDS
    assert pauses == [min(FIRST_PAUSE_ROUNDS << i, LONGEST_PAUSE_ROUNDS) for i in range(8)]


def test_a_probe_that_pays_ends_the_pauses() -> None:
    payoff = Payoff(may_pause=True)
    feed(payoff, USELESS, 1000)
    sit_out(payoff)
    assert feed(payoff, USEFUL, 1000) == 1000
    assert feed(payoff, USELESS, 1000) <= 2 * TRIAL_ROUNDS
    assert payoff.pause_rounds == FIRST_PAUSE_ROUNDS, "as if it were the first"


def test_what_the_target_needs_alone_is_counted_once_it_was_measured() -> None:
    """With one token in two accepted this draft pays against a slow target, and not against a fast one."""
    half = RoundCost(was_asked=True, accepted=1, proposing_seconds=0.02, seconds=0.06)
    assert feed(Payoff(may_pause=True), half, 1000) == 1000
    payoff = Payoff(may_pause=True)
    payoff.add(RoundCost(was_asked=False, accepted=0, proposing_seconds=0.0, seconds=0.02))
    assert feed(payoff, half, 1000) == TRIAL_ROUNDS


def test_a_hiccup_pauses_nothing() -> None:
    payoff = Payoff(may_pause=True)
    hiccup = RoundCost(was_asked=True, accepted=4, proposing_seconds=60.0, seconds=60.04)
    for round_number in range(10 * TRIAL_ROUNDS):
        assert not payoff.add(hiccup if round_number % 5 == 0 else USEFUL)


@given(st.lists(st.sampled_from([USELESS, USEFUL, ALONE]), max_size=400))
def test_whatever_comes_pauses_are_bounded_and_end(costs: list[RoundCost]) -> None:
    payoff = Payoff(may_pause=True)
    for cost in costs:
        if payoff.is_paused:
            assert 0 < payoff.pause_rounds <= LONGEST_PAUSE_ROUNDS
            assert payoff.tokens(4) == 0
            payoff.add(ALONE)
        else:
            payoff.add(cost)
    assert sit_out(payoff) <= LONGEST_PAUSE_ROUNDS
