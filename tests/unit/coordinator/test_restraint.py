"""All requests at once propose fewer tokens where that is faster, by measured numbers alone.

Accepted tokens are drawn with fixed seeds. The lengths of `length_costs` differ by far more than the few per cent by
which what hundreds of rounds accept may differ from its expectation.
"""

from __future__ import annotations

from functools import partial

import pytest

from coordinator.lengths import FIRST_STAY_ROUNDS, LONGEST_STAY_ROUNDS
from coordinator.payoff import Payoff, RoundCost
from coordinator.restraint import BURST, MANY, REMEMBERED_ROUNDS, Restraint
from tests.unit.coordinator.length_costs import CHEAP, COSTLY, SHORT, WHOLE, Cost, K, Machine

FEW = 4


@pytest.mark.parametrize("load", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize(("cost", "best"), [(COSTLY, 0), (SHORT, 1), (CHEAP, 4), (WHOLE, 4)])
def test_all_keep_to_the_length_that_makes_the_most_tokens(load: int, cost: Cost, best: int) -> None:
    machine = Machine(load, cost)
    assert machine.efficiency(machine.run(max(1600, 6400 // load))) > 0.85
    machine.run(4000)
    lengths = machine.run(4000)
    assert machine.efficiency(lengths) > 0.97, "the others are tried ever more rarely"
    assert lengths.count(best) > 0.95 * len(lengths)


@pytest.mark.parametrize("load", [1, 4, 16])
def test_times_that_vary_by_a_third_do_not_change_that(load: int) -> None:
    for cost in (COSTLY, CHEAP, WHOLE):
        machine = Machine(load, cost, noise=0.33)
        machine.run(2000)
        assert machine.efficiency(machine.run(4000)) > 0.95


@pytest.mark.parametrize(("before", "after", "best"), [(COSTLY, CHEAP, 4), (CHEAP, COSTLY, 0)])
def test_what_changes_is_found_out(before: Cost, after: Cost, best: int) -> None:
    machine = Machine(16, before)
    machine.run(5000)
    machine.cost = after
    machine.run(3 * LONGEST_STAY_ROUNDS)
    lengths = machine.run(LONGEST_STAY_ROUNDS)
    assert lengths.count(best) > len(lengths) / 2


def test_what_slows_down_both_lengths_for_a_while_decides_nothing() -> None:
    """Prompts are read in the first rounds of many."""
    machine = Machine(16, COSTLY)
    for _ in range(60):
        machine.cost = Cost(COSTLY.acceptance, lambda proposed: 5 * COSTLY.seconds(proposed))
        machine.run(5)
        machine.cost = COSTLY
        machine.run(25)
    assert machine.efficiency(machine.run(1000)) > 0.95


def test_each_load_is_judged_by_itself() -> None:
    machine = Machine(16, COSTLY)
    machine.run(100)
    machine.load, machine.cost = 5, CHEAP
    machine.run(100)
    machine.restraint._loads.clear()
    assert [machine.restraint._level().kept for machine.load in (5, 12, 16, 23)] == [K, 0, 0, 0]


def test_few_begin_as_asked_and_many_with_the_target_alone() -> None:
    loads = (1, MANY - 1, MANY, 100)
    assert [Restraint(K, partial(int, load)).tokens for load in loads] == [K, K, 0, 0]


@pytest.mark.parametrize(("load", "others"), [(8, (4, 5)), (16, (32, 100))])
@pytest.mark.parametrize(("cost", "best"), [(COSTLY, 0), (CHEAP, K)])
def test_a_load_begins_with_what_the_nearest_one_found_best(
    load: int, others: tuple[int, ...], cost: Cost, best: int
) -> None:
    """Few by few and many by many: what pays for five says little of fifty."""
    machine = Machine(load, cost)
    machine.run(150)
    machine.restraint._loads.clear()
    assert {machine.restraint._level().kept for machine.load in others} == {best}
    machine.load = 16 if load == 8 else 8
    assert machine.restraint.tokens == (0 if load == 8 else K)


def test_where_many_have_just_ended_the_first_of_others_do_not_begin_as_few() -> None:
    machine = Machine(16, COSTLY)
    machine.run(30)
    machine.load = 1
    assert machine.run(REMEMBERED_ROUNDS + 1) == [0] * REMEMBERED_ROUNDS + [K]


def test_few_that_follow_among_many_find_it_out_as_well() -> None:
    machine = Machine(1, COSTLY, strangers=15)
    machine.run(300)
    assert machine.efficiency(machine.run(1000)) > 0.9


def test_rounds_that_measure_nothing_hold_nothing_up() -> None:
    """Half of the requests are paused."""
    machine = Machine(8, COSTLY)
    machine.run(0)
    for _ in range(200):
        length = machine.restraint.tokens
        for _ in range(4):
            machine.restraint.add(None)
            machine.restraint.add(length, *machine.round(length))
    assert machine.restraint.tokens == 0


def test_a_comparison_that_was_long_ago_begins_anew() -> None:
    machine = Machine(16, WHOLE)
    while not machine.restraint.tokens:
        machine.run(1)
    machine.load = 64
    machine.run(FIRST_STAY_ROUNDS + 2)
    machine.load, machine.cost = 16, COSTLY
    machine.restraint._loads.clear()
    assert machine.restraint.tokens == 0


def test_a_request_that_has_ended_follows_no_more() -> None:
    restraint = Restraint(K, lambda: 8)
    payoffs = [Payoff(may_pause=True, restraint=restraint) for _ in range(16)]
    for payoff in payoffs[1:]:
        payoff.end()
        payoff.end()
    machine = Machine(8, COSTLY)
    for _ in range(400):
        length = restraint.tokens
        restraint.add(length, *machine.round(length))
    assert restraint.tokens == 0, "one is enough to find it out in 400 rounds"


@pytest.mark.parametrize("may_pause", [True, False])
def test_a_request_is_restrained_with_the_others_where_it_may(may_pause: bool) -> None:
    machine = Machine(8, COSTLY)
    machine.run(150)
    payoff = Payoff(may_pause=may_pause, restraint=machine.restraint)
    assert payoff.tokens(K) == (0 if may_pause else K)


def rounds_of(restraint: Restraint, count: int, *, is_lost: bool) -> list[int]:
    """Lengths asked for in so many rounds of a few requests, by the path that requests take."""
    payoffs = [Payoff(may_pause=True, restraint=restraint) for _ in range(FEW)]
    lengths = []
    for _ in range(count):
        for payoff in payoffs:
            lengths.append(length := payoff.tokens(K))
            asked = length > 0 and not is_lost
            cost = RoundCost(
                was_asked=asked,
                accepted=length if asked else 0,
                proposing_seconds=0.001 if asked else 0.0,
                seconds=0.011 if asked else 0.01,
            )
            payoff.add(cost)
    return lengths


def test_a_round_counts_as_what_it_committed_and_took() -> None:
    lengths = rounds_of(Restraint(K, lambda: FEW), 1000, is_lost=False)
    assert lengths.count(K) > 0.9 * len(lengths)


def test_rounds_whose_draft_was_lost_decide_nothing() -> None:
    lengths = rounds_of(Restraint(K, lambda: FEW), 1000, is_lost=True)
    assert lengths.count(K) > 0.5 * len(lengths), "it is kept, and compared with rounds that say nothing"


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
    restraint = Restraint(K, lambda: FEW)
    for rounds in (0, 1, 2):
        for request in _beginning(restraint, BURST + 1):
            for _ in range(rounds):
                request.tokens(K)
            request.end()
            request.end()
    assert not restraint.is_burst
    (only,) = _beginning(restraint, 1)
    assert only.tokens(K) == K
