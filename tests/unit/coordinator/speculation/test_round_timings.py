"""The time that a round waits for a draft follows from measurements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.speculation.round_timings import RoundTimings
from coordinator.stats.rounds import RoundCost
from tandem.types import StepCost


def test_before_any_measurement_the_wait_is_short() -> None:
    assert RoundTimings(None).patience_seconds == 0.25


def test_the_wait_ends_a_few_verifications_after_the_usual_time() -> None:
    timings = RoundTimings(None)
    timings.verified(9.0, 0, is_first=True)
    timings.verified(0.1, 4, is_first=False)
    timings.drafted(0.2, None)
    assert timings.patience_seconds == pytest.approx(0.6)


def test_the_first_answer_counts_only_while_there_is_no_other() -> None:
    timings = RoundTimings(None)
    timings.verified(0.15, 0, is_first=True)
    assert timings.patience_seconds == pytest.approx(0.6)
    timings.verified(0.1, 4, is_first=False)
    assert timings.patience_seconds == pytest.approx(0.4)


def test_a_configured_wait_overrides_measurements() -> None:
    timings = RoundTimings(3.0)
    timings.verified(0.1, 4, is_first=False)
    assert timings.patience_seconds == 3.0


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.integers(0, 8), st.booleans()), max_size=20))
def test_a_draft_that_hangs_costs_less_than_a_second(times: list[tuple[float, int, bool]]) -> None:
    timings = RoundTimings(None)
    for seconds, proposed, is_first in times:
        timings.verified(seconds, proposed, is_first=is_first)
        timings.proposing.add(seconds)
    assert 0.25 <= timings.patience_seconds < 1.0


def test_a_round_is_reported_once_and_a_prefill_is_not() -> None:
    timings = RoundTimings(None)
    assert timings.end_round(1.0) is None
    timings.drafted(0.03, StepCost(0.02, 3, 12))
    timings.verified(0.1, 4, is_first=False, cost=StepCost(0.08, 2, 9))
    assert timings.end_round(0.2) == RoundCost(4, 0.2, 0.08, 2, 9, 0.02, 3)
    assert timings.end_round(0.2) is None
    timings.verified(0.1, 0, is_first=True)
    assert timings.end_round(0.2) is None


def test_without_reported_costs_the_measured_times_count() -> None:
    timings = RoundTimings(None)
    timings.load = 5
    timings.drafted(0.03, None)
    timings.verified(0.1, 4, is_first=False)
    assert timings.end_round(0.2) == RoundCost(4, 0.2, 0.1, 5, 25, 0.03, 5)


def test_a_round_that_waited_in_vain_is_marked() -> None:
    timings = RoundTimings(None)
    timings.was_late()
    timings.verified(0.1, 0, is_first=False)
    cost = timings.end_round(0.5)
    assert cost is not None
    assert cost.was_late
    timings.verified(0.1, 0, is_first=False)
    cost = timings.end_round(0.5)
    assert cost is not None
    assert not cost.was_late


def test_a_proposal_of_an_earlier_round_has_no_cost() -> None:
    timings = RoundTimings(None)
    timings.verified(0.1, 4, is_first=False)
    assert timings.end_round(0.2) is None


def test_a_round_is_drafted_until_it_ends() -> None:
    timings = RoundTimings(None)
    timings.is_drafted = True
    timings.end_round(0.2)
    assert not timings.is_drafted
