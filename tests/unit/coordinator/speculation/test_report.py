"""The two figures of an explanation agree with its words."""

from __future__ import annotations

import pytest

from coordinator.speculation import report
from coordinator.speculation.choice import MANY
from coordinator.speculation.controller import SpeculationController
from tandem.speculation_state import SpeculationState
from tandem.types import SpeculationStats
from tests.unit.coordinator.speculation.test_controller import K, begun, simulate


def state(load: int, draft: float, accepted: int, rounds: int = 300) -> SpeculationState:
    """State of a request whose draft takes this share of a verification for each token."""
    request = begun(SpeculationController())
    simulate(request, rounds, draft, accepted, load)
    return report.decided(request)


def test_a_draft_that_pays_is_on() -> None:
    assert state(1, 0.05, K).is_on


def test_a_draft_that_does_not_pay_is_slower_by_the_figures() -> None:
    off = state(1, 0.5, 0)
    assert off.reason == report.DOES_NOT_PAY
    with_draft, alone = off.figures
    assert with_draft.value < alone.value


def test_a_small_gain_is_not_called_a_loss() -> None:
    off = state(1, 0.86, K)
    assert off.reason == report.GAINS_TOO_LITTLE
    with_draft, alone = off.figures
    assert with_draft.value >= alone.value


@pytest.mark.parametrize("draft", [0.05, 0.5])
def test_many_requests_that_nothing_was_measured_for_are_not_called_slower(draft: float) -> None:
    """Rounds at another load already predict that drafting would be faster."""
    controller = SpeculationController()
    simulate(begun(controller), 300, draft, K)
    many = begun(controller)
    assert many.begin_round(2 * MANY) == 0
    off = report.decided(many)
    assert off.explanation == f"{report.NOT_MEASURED} (running {2 * MANY}, limit {MANY} requests)"


def test_a_draft_that_finds_no_match_is_not_called_too_slow_for_the_completion() -> None:
    on = report.on(2)
    assert report.at_the_end(on, SpeculationStats(rounds=1)).reason == report.TOO_SHORT
    assert report.at_the_end(on, SpeculationStats(rounds=24)).reason == report.PROPOSED_NOTHING
    assert report.at_the_end(on, SpeculationStats(rounds=24, drafted=2)) == on
