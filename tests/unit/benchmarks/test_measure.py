"""Turns of contenders, and steps with a minimum time."""

from __future__ import annotations

from itertools import product

import pytest

from benchmarks.common import rotated
from benchmarks.pace import Pace
from tandem.engine.core.jobs import StepRecord


def test_everyone_runs_once_in_each_round_and_at_each_place_equally_often() -> None:
    names = ["a", "b", "c"]
    rounds = [rotated(names, number) for number in range(6)]

    assert all(sorted(order) == names for order in rounds)
    for name, place in product(names, range(3)):
        assert [order[place] for order in rounds].count(name) == 2


def test_a_step_sleeps_for_what_is_left_of_its_time() -> None:
    pace = Pace.from_text("6.5,1.2,0.1")
    slept: list[float] = []
    seen: list[StepRecord] = []
    wait = pace.paced("target", seen.append, slept.append)
    wait(StepRecord(1, 1, 1, 0.001, 0.0025))
    wait(StepRecord(1, 9, 9, 0.001, 0.0))
    wait(StepRecord(1, 1, 1, 0.1, 0.1))
    assert slept == pytest.approx([0.004, 0.0065 * 1.1])
    assert len(seen) == 3
    assert pace.seconds("draft", 1) == pytest.approx(0.0012)
