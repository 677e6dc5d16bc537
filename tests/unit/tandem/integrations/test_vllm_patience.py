"""The wait for proposals is bounded by what they save, and given up where nothing comes."""

from __future__ import annotations

import pytest

from tandem.integrations.vllm.proposer import MAX_SECONDS, MIN_SECONDS, AheadSwitch, Patience
from tandem.types import AheadBudget


def learnt(step_seconds: float, accepted: int, steps: int = 100) -> Patience:
    patience = Patience(4)
    for _ in range(steps):
        patience.stepped(step_seconds)
        patience.came_out(4, accepted)
    return patience


@pytest.mark.parametrize(("accepted", "seconds"), [(0, MIN_SECONDS), (1, 0.02), (3, 0.06)])
def test_a_step_waits_for_what_the_accepted_tokens_save(accepted: int, seconds: float) -> None:
    assert learnt(0.02, accepted).seconds == pytest.approx(seconds)


def test_no_step_waits_longer_than_the_maximum() -> None:
    assert learnt(10.0, 4).seconds == MAX_SECONDS


def test_a_fixed_bound_is_kept() -> None:
    patience = Patience(4, fixed_seconds=0.123)
    patience.stepped(1.0)
    assert patience.seconds == 0.123


def test_one_long_step_does_not_make_it_patient() -> None:
    patience = learnt(0.01, 2)
    before = patience.seconds
    patience.stepped(20.0)
    assert patience.seconds < 1.5 * before


def test_waits_in_vain_end_and_become_rarer() -> None:
    """A draft that is always too late costs fewer and fewer steps."""
    patience = Patience(4)
    waits = 0
    for _ in range(4000):
        if patience.may_ask():
            waits += 1
            patience.waited(in_vain=True)
    assert waits < 16


def test_an_answer_in_time_ends_the_pauses() -> None:
    patience = Patience(4)
    for _ in range(50):
        if patience.may_ask():
            patience.waited(in_vain=True)
    while not patience.may_ask():
        pass
    patience.waited(in_vain=False)
    assert all(patience.may_ask() for _ in range(100))


def test_drafting_ahead_as_configured() -> None:
    assert AheadSwitch("off", 4).begin_step(1) is None
    assert AheadSwitch("off", 4).max_budget is None
    assert AheadSwitch(5, 4).begin_step(16) == AheadBudget(5, 4)


@pytest.mark.parametrize(("ahead_seconds", "pays"), [(0.01, True), (0.03, False)])
def test_drafting_ahead_is_used_where_it_was_measured_to_pay(ahead_seconds: float, pays: bool) -> None:
    switch = AheadSwitch("auto", 4)
    ways = []
    for _ in range(400):
        is_ahead = switch.begin_step(1) is not None
        ways.append(is_ahead)
        switch.end_step(3.0, ahead_seconds if is_ahead else 0.02)
    assert any(ways), "it was never tried"
    assert (sum(ways[-200:]) > 100) is pays
