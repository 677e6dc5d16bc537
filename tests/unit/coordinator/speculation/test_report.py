"""The two figures of an explanation agree with its words."""

from __future__ import annotations

from coordinator.speculation import report
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
    controller = SpeculationController()
    simulate(begun(controller, is_adaptive=False), 300, 0.94, K)
    request = begun(controller)
    simulate(request, 40, 0.94, K)
    off = report.decided(request)
    assert off.reason == report.GAINS_TOO_LITTLE
    with_draft, alone = off.figures
    assert with_draft.value >= alone.value


def test_a_draft_that_finds_no_match_is_not_called_too_slow_for_the_completion() -> None:
    on = report.on(2)
    assert report.at_the_end(on, SpeculationStats(rounds=1)).reason == report.TOO_SHORT
    assert report.at_the_end(on, SpeculationStats(rounds=24)).reason == report.PROPOSED_NOTHING
    assert report.at_the_end(on, SpeculationStats(rounds=24, drafted=2)) == on
