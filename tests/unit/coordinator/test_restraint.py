"""Many requests at once propose fewer tokens where that is faster, by measured numbers alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest

from coordinator.payoff import Payoff, RoundCost
from coordinator.restraint import (
    BURST,
    CLEAR,
    LEAST_LOAD,
    LONGEST_STAY_ROUNDS,
    MANY,
    SETTLING_ROUNDS,
    TURN_ROUNDS,
    TURNS,
    Restraint,
)

K = 4
COMPARISON_ROUNDS = 2 * TURNS * (SETTLING_ROUNDS + TURN_ROUNDS)

Round = Callable[[int], tuple[float, float]]
"""Tokens and seconds of a round that proposes so many."""


def costly(proposed: int) -> tuple[float, float]:
    """As measured on two cores with 16 requests and 200 million parameters: computing is what takes the time, and a
    proposal is worth it for no length."""
    return sum(0.6**i for i in range(proposed + 1)), 0.03 + 0.01 * proposed + 0.06 * (proposed + 1)


def cheap(proposed: int) -> tuple[float, float]:
    """Reading the weights is what takes the time."""
    return sum(0.8**i for i in range(proposed + 1)), 0.05 + 0.005 * proposed


def short(proposed: int) -> tuple[float, float]:
    """The first token proposed is nearly free, the others are not."""
    return sum(0.7**i for i in range(proposed + 1)), 0.05 + 0.01 * proposed**2


@dataclass
class Machine:
    """Requests that run side by side, a round of each after the other's."""

    load: int
    cost: Round
    strangers: int = 0
    """Requests that run beside them and follow nothing."""

    def __post_init__(self) -> None:
        self.restraint = Restraint(K, lambda: self.load + self.strangers)
        self.followers = 0

    def run(self, rounds: int) -> list[int]:
        """The lengths of the proposals in so many rounds of all requests."""
        for _ in range(self.load - self.followers):
            self.restraint.join()
        for _ in range(self.followers - self.load):
            self.restraint.leave()
        self.followers = self.load
        lengths = []
        for _ in range(rounds):
            lengths.append(length := self.restraint.tokens)
            for _ in range(self.load):
                self.restraint.add(length, *self.cost(length))
        return lengths

    def efficiency(self, lengths: list[int]) -> float:
        """Tokens a second, by those of the best length."""
        rounds = [self.cost(length) for length in lengths]
        best = max(tokens / seconds for tokens, seconds in map(self.cost, (0, 1, 2, 4)))
        return sum(tokens for tokens, _ in rounds) / sum(seconds for _, seconds in rounds) / best


@pytest.mark.parametrize(("cost", "best"), [(costly, 0), (short, 1), (cheap, 4)])
def test_many_keep_to_the_length_that_makes_the_most_tokens(cost: Round, best: int) -> None:
    machine = Machine(16, cost)
    assert machine.efficiency(machine.run(400)) > 0.9
    lengths = machine.run(4000)
    assert machine.efficiency(lengths) > 0.98, "the others are tried ever more rarely"
    assert lengths.count(best) > 0.95 * len(lengths)


@pytest.mark.parametrize(("before", "after", "best"), [(costly, cheap, 4), (cheap, costly, 0)])
def test_what_changes_is_found_out(before: Round, after: Round, best: int) -> None:
    machine = Machine(16, before)
    machine.run(5000)
    machine.cost = after
    machine.run(2 * LONGEST_STAY_ROUNDS)
    lengths = machine.run(LONGEST_STAY_ROUNDS)
    assert lengths.count(best) > len(lengths) / 2


def test_a_few_decide_for_themselves() -> None:
    assert Machine(LEAST_LOAD - 1, costly).run(1000) == [K] * 1000


def test_each_load_is_judged_by_itself() -> None:
    machine = Machine(16, costly)
    machine.run(100)
    machine.load, machine.cost = 5, cheap
    machine.run(100)
    assert [machine.restraint.tokens for machine.load in (5, 12, 16, 23)] == [K, 0, 0, 0]


def test_few_begin_as_asked_and_many_with_the_target_alone() -> None:
    loads = (LEAST_LOAD, MANY - 1, MANY, 100)
    assert [Restraint(K, partial(int, load)).tokens for load in loads] == [K, K, 0, 0]


@pytest.mark.parametrize(("load", "others"), [(8, (4, 5)), (16, (32, 100))])
@pytest.mark.parametrize(("cost", "best"), [(costly, 0), (cheap, K)])
def test_a_load_begins_with_what_the_nearest_one_found_best(
    load: int, others: tuple[int, ...], cost: Round, best: int
) -> None:
    """Few by few and many by many: what pays for five says little of fifty."""
    machine = Machine(load, cost)
    machine.run(100)
    assert {machine.restraint.tokens for machine.load in others} == {best}
    machine.load = 16 if load == 8 else 8
    assert machine.restraint.tokens == (0 if load == 8 else K)


@pytest.mark.parametrize("load", [8, 16])
def test_of_two_that_are_as_fast_the_shorter_one_is_kept(load: int) -> None:
    def even(proposed: int) -> tuple[float, float]:
        return 1.0 + proposed, 0.05 * (1.0 + proposed) * (1.0 + 1e-6 * proposed)

    machine = Machine(load, even)
    machine.run(100)
    assert machine.restraint.tokens == 0


def test_rounds_that_share_steps_with_the_length_before_do_not_count() -> None:
    machine = Machine(8, cheap)
    machine.run(SETTLING_ROUNDS)
    for _ in range(2 * TURNS):
        length = machine.restraint.tokens
        committed, seconds = (0, 1.0) if length == K else (1000, 1e-6)
        for _ in range(8 * SETTLING_ROUNDS):
            machine.restraint.add(length, committed, seconds)
        machine.run(TURN_ROUNDS)
    assert machine.run(10 * COMPARISON_ROUNDS).count(K) > 5 * COMPARISON_ROUNDS, "too good to be believed"


def test_what_slows_down_both_lengths_for_a_while_decides_nothing() -> None:
    """Prompts are read in the first rounds of many."""
    machine = Machine(16, costly)
    for _ in range(20):
        machine.cost = lambda proposed: (costly(proposed)[0], 5 * costly(proposed)[1])
        machine.run(5)
        machine.cost = costly
        machine.run(25)
    assert machine.restraint.tokens == 0
    assert machine.efficiency(machine.run(1000)) > 0.95


@pytest.mark.parametrize(
    ("most", "lengths"), [(1, {1, 0}), (4, {4, 2, 1, 0}), (5, {5, 2, 1, 0}), (8, {8, 4, 2, 1, 0})]
)
def test_all_lengths_down_to_none_are_halves(most: int, lengths: set[int]) -> None:
    restraint = Restraint(most, lambda: LEAST_LOAD)
    restraint.join()
    seen = set()
    for _ in range(200):
        seen.add(restraint.tokens)
        restraint.add(restraint.tokens, *costly(restraint.tokens))
    assert seen == lengths


def test_few_that_follow_among_many_find_it_out_as_fast() -> None:
    machine = Machine(1, costly, strangers=15)
    machine.run(100)
    assert machine.restraint.tokens == 0


def test_rounds_that_measure_nothing_hold_nothing_up() -> None:
    """Half of the requests are paused."""
    machine = Machine(16, costly)
    machine.run(0)
    for _ in range(100):
        length = machine.restraint.tokens
        for _ in range(8):
            machine.restraint.add(None)
            machine.restraint.add(length, *machine.cost(length))
    assert machine.restraint.tokens == 0


def test_a_comparison_that_another_load_interrupted_begins_anew() -> None:
    machine = Machine(16, costly)
    machine.run(SETTLING_ROUNDS + 1)
    assert machine.restraint.tokens == 1, "it is being compared"
    machine.load = 64
    machine.run(10)
    machine.load = 16
    assert machine.restraint.tokens == 0


def test_a_request_that_has_ended_follows_no_more() -> None:
    restraint = Restraint(K, lambda: 16)
    payoffs = [Payoff(may_pause=True, restraint=restraint) for _ in range(16)]
    for payoff in payoffs[1:]:
        payoff.end()
        payoff.end()
    for _ in range(100):
        length = restraint.tokens
        restraint.add(length, *costly(length))
    assert restraint.tokens == 0, "one is enough to find it out in 100 rounds"


@pytest.mark.parametrize("may_pause", [True, False])
def test_a_request_is_restrained_with_the_others_where_it_may(may_pause: bool) -> None:
    machine = Machine(16, costly)
    machine.run(100)
    payoff = Payoff(may_pause=may_pause, restraint=machine.restraint)
    assert payoff.tokens(K) == (0 if may_pause else K)
    assert Payoff(may_pause=may_pause, restraint=Restraint(K, lambda: 1)).tokens(K) == K


def rounds_of(restraint: Restraint, count: int, *, is_lost: bool) -> list[int]:
    """Lengths asked for in so many rounds of `LEAST_LOAD` requests, by the path that requests take."""
    payoffs = [Payoff(may_pause=True, restraint=restraint) for _ in range(LEAST_LOAD)]
    lengths = []
    for _ in range(count):
        for payoff in payoffs:
            lengths.append(length := payoff.tokens(K))
            asked = length > 0 and not is_lost
            payoff.add(
                RoundCost(
                    was_asked=asked,
                    accepted=length if asked else 0,
                    proposing_seconds=0.001 if asked else 0.0,
                    verifying_seconds=0.01,
                )
            )
    return lengths


def test_a_round_counts_as_what_it_committed_and_took() -> None:
    lengths = rounds_of(Restraint(K, lambda: LEAST_LOAD), 1000, is_lost=False)
    assert lengths.count(K) > 0.9 * len(lengths)


def test_rounds_whose_draft_was_lost_decide_nothing() -> None:
    lengths = rounds_of(Restraint(K, lambda: LEAST_LOAD), 1000, is_lost=True)
    assert lengths.count(K) > 0.9 * len(lengths)


def _trial(machine: Machine) -> int:
    """Rounds with a proposal in the first comparison of a load that begins with the target alone."""
    return machine.run(SETTLING_ROUNDS + COMPARISON_ROUNDS)[: COMPARISON_ROUNDS + 1].count(1)


@pytest.mark.parametrize(("slowdown", "turns"), [(CLEAR + 0.3, 1), (CLEAR - 0.2, TURNS)])
def test_what_is_clearly_slower_is_not_tried_for_long(slowdown: float, turns: int) -> None:
    machine = Machine(16, lambda proposed: (1.0, slowdown if proposed else 1.0))
    assert _trial(machine) == turns * (SETTLING_ROUNDS + TURN_ROUNDS)
    assert machine.restraint.tokens == 0


@pytest.mark.parametrize(("slowdown", "rounds"), [(CLEAR + 0.3, 2), (CLEAR - 0.2, 2 * TURNS)])
def test_the_shorter_length_is_taken_up_at_once_where_it_is_clearly_faster(
    slowdown: float, rounds: int
) -> None:
    machine = Machine(8, lambda proposed: (1.0, slowdown if proposed == K else 1.0))
    lengths = machine.run(SETTLING_ROUNDS + rounds * (SETTLING_ROUNDS + TURN_ROUNDS))
    assert lengths.count(K // 2) == rounds // 2 * (SETTLING_ROUNDS + TURN_ROUNDS)
    assert machine.restraint.tokens == K // 2


def test_the_longer_one_never_is() -> None:
    machine = Machine(16, lambda proposed: (1.0, 1.0 if proposed else CLEAR + 0.3))
    machine.run(SETTLING_ROUNDS + COMPARISON_ROUNDS - 1)
    (level,) = machine.restraint._levels.values()
    assert machine.restraint._lengths[level.kept] == 0
    machine.run(1)
    assert machine.restraint._lengths[level.kept] == 1


def _beginning(restraint: Restraint, count: int) -> list[Payoff]:
    return [Payoff(may_pause=True, restraint=restraint) for _ in range(count)]


def test_of_a_burst_those_that_come_last_do_without_a_draft_in_their_first_round() -> None:
    """By then it is known how many they are."""
    restraint = Restraint(K, lambda: MANY - 1)
    requests: list[Payoff] = []
    first = []
    for _ in range(BURST + 3):
        requests += _beginning(restraint, 1)
        first.append(requests[-1].tokens(K))
    assert first == [K] * BURST + [0] * 3
    assert [request.tokens(K) for request in requests] == [K] * (BURST + 3)
    (late,) = _beginning(restraint, 1)
    assert late.tokens(K) == K, "the burst is over"


def test_requests_that_end_in_their_first_round_are_no_burst_any_more() -> None:
    restraint = Restraint(K, lambda: LEAST_LOAD)
    for rounds in (0, 1, 2):
        for request in _beginning(restraint, BURST + 1):
            for _ in range(rounds):
                request.tokens(K)
            request.end()
            request.end()
    assert not restraint.is_burst
    (only,) = _beginning(restraint, 1)
    assert only.tokens(K) == K
