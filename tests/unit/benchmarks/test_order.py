"""Who runs when."""

from __future__ import annotations

from itertools import product

from benchmarks.order import chosen, rotated


def test_everyone_runs_once_in_each_round_and_at_each_place_equally_often() -> None:
    names = ["a", "b", "c"]
    rounds = [rotated(names, number) for number in range(6)]

    assert all(sorted(order) == names for order in rounds)
    for name, place in product(names, range(3)):
        assert [order[place] for order in rounds].count(name) == 2


def test_nobody_to_run() -> None:
    assert rotated([], 3) == []


def test_each_round_has_the_next_prompts() -> None:
    rounds = [chosen("abcde", 2, number) for number in range(4)]

    assert rounds == [("a", "b"), ("c", "d"), ("e", "a"), ("b", "c")]


def test_a_batch_larger_than_the_prompts_begins_again() -> None:
    assert chosen("ab", 5, 0) == ("a", "b", "a", "b", "a")
