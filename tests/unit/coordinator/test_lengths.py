"""Which length of proposals is kept follows from comparisons of rounds in turn."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from coordinator.lengths import (
    BEGINNING_ROUNDS,
    CLEAR,
    FEW,
    FIRST_STAY_ROUNDS,
    LEAST_ADVANTAGE,
    LEAST_TURN_ROUNDS,
    LONGEST_STAY_ROUNDS,
    READING,
    SETTLING_ROUNDS,
    TURN_ROUNDS,
    TURNS,
    Comparison,
    Lengths,
)

REQUESTS = 8
ROUNDS = SETTLING_ROUNDS + TURN_ROUNDS
"""Of each request, in a turn of so many requests."""


@dataclass
class Trial:
    """Rounds of several requests that accept nothing, and take so many seconds by length."""

    seconds: dict[int, float]
    first: int = 4
    requests: int = REQUESTS
    lengths: Lengths = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = Lengths(4, self.first)

    def run(self, rounds: int) -> list[int]:
        """The lengths of so many rounds of each request."""
        seen = []
        for _ in range(rounds):
            seen.append(length := self.lengths.tokens)
            for _ in range(self.requests):
                self.lengths.add(length, 0, self.seconds.get(length, 1.0), self.requests)
        return seen

    def begin(self) -> None:
        """Up to the first comparison."""
        self.run(BEGINNING_ROUNDS * max(1, FEW // self.requests))


@pytest.mark.parametrize(
    ("most", "lengths"), [(1, {1, 0}), (4, {4, 2, 1, 0}), (5, {5, 2, 1, 0}), (8, {8, 4, 2, 1, 0})]
)
def test_all_lengths_down_to_none_are_halves(most: int, lengths: set[int]) -> None:
    tried = Lengths(most, most)
    seen = set()
    for _ in range(5000):
        seen.add(tried.tokens)
        tried.add(tried.tokens, 0, 0.1 if tried.tokens == most else 1.0, 1)
    assert seen == lengths


@pytest.mark.parametrize(("requests", "rounds"), [(1, LEAST_TURN_ROUNDS), (4, 3), (16, 2)])
def test_turns_are_long_enough_to_say_something(requests: int, rounds: int) -> None:
    trial = Trial({}, requests=requests)
    trial.begin()
    turn = SETTLING_ROUNDS + rounds
    assert trial.run(2 * turn) == [0] * turn + [4] * turn


def test_the_target_alone_is_compared_first_and_then_the_others() -> None:
    trial = Trial({4: 1.0}, first=4)
    trial.begin()
    seen = trial.run(1000)
    assert list(dict.fromkeys(seen)) == [0, 4, 2, 1]


@pytest.mark.parametrize(("slowdown", "turns"), [(CLEAR + 0.3, 1), (CLEAR - 0.1, TURNS)])
@pytest.mark.parametrize(("kept", "other"), [(4, 0), (0, 4)])
def test_what_is_clearly_slower_is_not_tried_for_long(
    kept: int, other: int, slowdown: float, turns: int
) -> None:
    slower = slowdown * (READING if kept else 1 / READING)
    trial = Trial({other: slower}, first=kept)
    trial.begin()
    assert trial.run(2 * turns * ROUNDS).count(other) == turns * ROUNDS
    assert trial.lengths.kept == kept


@pytest.mark.parametrize(("slowdown", "turns"), [(CLEAR + 0.3, 1), (CLEAR - 0.1, TURNS)])
def test_a_shorter_length_is_taken_up_at_once_where_it_is_clearly_faster(slowdown: float, turns: int) -> None:
    trial = Trial({4: slowdown / READING})
    trial.begin()
    trial.run(2 * turns * ROUNDS - 1)
    assert trial.lengths.kept == 4
    trial.run(1)
    assert trial.lengths.kept == 0


def test_a_longer_one_never_is() -> None:
    trial = Trial({0: 10.0}, first=0)
    trial.begin()
    trial.run(2 * TURNS * ROUNDS - 1)
    assert trial.lengths.kept == 0
    trial.run(1)
    assert trial.lengths.kept == 4


@pytest.mark.parametrize("kept", [0, 4])
def test_of_two_that_are_as_fast_the_one_kept_stays(kept: int) -> None:
    """As fast as rounds with a draft must be for it to be worth what they do not show."""
    seconds = {0: 1.0} | dict.fromkeys((1, 2, 4), 1.0 / READING)
    trial = Trial(seconds, first=kept)
    trial.run(2000)
    assert trial.lengths.kept == kept


@pytest.mark.parametrize(("margin", "kept"), [(LEAST_ADVANTAGE - 0.01, 0), (LEAST_ADVANTAGE + 0.01, 4)])
def test_a_draft_must_be_worth_the_prompts_that_it_reads(margin: float, kept: int) -> None:
    trial = Trial(dict.fromkeys((1, 2), 9.0) | {4: 1.0 / (READING * margin)}, first=0)
    trial.run(200)
    assert trial.lengths.kept == kept


def test_comparisons_that_find_nothing_become_ever_rarer() -> None:
    trial = Trial(dict.fromkeys((1, 2, 4), 9.0), first=0)
    trial.begin()
    seen = trial.run(12 * LONGEST_STAY_ROUNDS)
    begins = [i for i in range(1, len(seen)) if seen[i] and not seen[i - 1]]
    stays = [later - earlier - 2 * ROUNDS for earlier, later in zip([0, *begins], begins, strict=False)]
    assert stays[:5] == [FIRST_STAY_ROUNDS << i for i in range(5)]
    assert set(stays[4:]) == {LONGEST_STAY_ROUNDS}


def test_rounds_that_share_steps_with_the_length_before_do_not_count() -> None:
    comparison = Comparison(0, 4)
    for _ in range(2 * TURNS):
        good = comparison.tokens == 4
        for _ in range(SETTLING_ROUNDS * REQUESTS):
            comparison.add(4 if good else 0, 1e-6 if good else 1.0, REQUESTS)
        for _ in range(TURN_ROUNDS * REQUESTS):
            comparison.add(0, 1.0, REQUESTS)
    assert comparison.is_over
    assert comparison.advantage == pytest.approx(1.0 / READING)


def test_what_of_a_longer_proposal_was_accepted_counts_for_the_shorter_one() -> None:
    """Two of three proposals of the longer one had both of the tokens that the shorter one has; its own had none."""
    comparison = Comparison(4, 2)
    for _ in range(2 * TURNS):
        accepted = {4: (4, 2, 0), 2: (0, 0, 0)}[comparison.tokens]
        for i in range(SETTLING_ROUNDS + LEAST_TURN_ROUNDS):
            measured = 1.0 if i >= SETTLING_ROUNDS + LEAST_TURN_ROUNDS - 3 else None
            comparison.add(accepted[i % 3], measured, 1)
    assert comparison.advantage == pytest.approx((1 + 4 / 6) / (1 + 6 / 3))


def test_a_hiccup_decides_nothing() -> None:
    comparison = Comparison(4, 0)
    for _ in range(2 * TURNS):
        for i in range(ROUNDS * REQUESTS):
            comparison.add(0, 100.0 if comparison.tokens == 4 and i % 5 == 0 else 1.0, REQUESTS)
    assert comparison.advantage == pytest.approx(READING)


@pytest.mark.parametrize("silent", [0, 4])
def test_what_was_not_measured_is_no_better(silent: int) -> None:
    trial = Trial({})
    for _ in range(2000):
        length = trial.lengths.tokens
        trial.lengths.add(length, 0, None if length == silent else 1.0, 1)
    assert trial.lengths.kept == 4


def test_an_interrupted_comparison_begins_anew() -> None:
    trial = Trial({})
    trial.begin()
    trial.run(ROUNDS - 1)
    trial.lengths.interrupt()
    assert trial.lengths.tokens == 4
    assert trial.run(1 + ROUNDS) == [4] + [0] * ROUNDS
