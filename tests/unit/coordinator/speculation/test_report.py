"""The two figures of an explanation agree with its words, and a state explains itself on one line."""

from __future__ import annotations

import pytest

from coordinator.speculation import report
from coordinator.speculation.controller import SpeculationController
from tandem.replica import ReplicaSnapshot, ReplicaState, Role
from tandem.speculation_state import DecidingFigure, SpeculationState
from tandem.types import SpeculationStats
from tests.unit.coordinator.cli import samples
from tests.unit.coordinator.speculation.test_controller import K, begun, simulate


def test_a_small_gain_is_not_called_a_loss() -> None:
    controller = SpeculationController()
    simulate(begun(controller, is_adaptive=False), 300, 0.98, K)
    request = begun(controller)
    simulate(request, 40, 0.98, K)
    off = report.decided(request)
    assert off.reason == report.GAINS_TOO_LITTLE
    with_draft, alone = off.figures
    assert with_draft.value >= alone.value


def test_a_draft_that_finds_no_match_is_not_called_too_slow_for_the_completion() -> None:
    on = report.on(2)
    assert report.at_the_end(on, SpeculationStats(rounds=1)).reason == report.TOO_SHORT
    assert report.at_the_end(on, SpeculationStats(rounds=24)).reason == report.PROPOSED_NOTHING
    assert report.at_the_end(on, SpeculationStats(rounds=24, drafted=2)) == on


@pytest.mark.parametrize(
    ("value", "words"), [(95.234, "95.23"), (114.0, "114"), (0.86, "0.86"), (12345.0, "12,345")]
)
def test_a_number_is_printed_with_few_digits_and_its_unit(value: float, words: str) -> None:
    assert str(DecidingFigure("target alone", value, "tokens/s")) == f"target alone {words} tokens/s"
    assert str(DecidingFigure("speed-up", value, "")) == f"speed-up {words}"


def test_the_explanation_is_the_reason_and_its_numbers() -> None:
    figures = (DecidingFigure("with", 95.2, "tokens/s"), DecidingFigure("without", 114.1, "tokens/s"))
    state = SpeculationState(False, 0, "it is slower", figures)
    assert state.explanation == "it is slower (with 95.2, without 114.1 tokens/s)"
    assert SpeculationState(False, 0, "nobody asked").explanation == "nobody asked"
    assert SpeculationState(True, 4).explanation == ""


TARGET = samples.replica(Role.TARGET, "127.0.0.1:1")
CONNECTING = samples.replica(Role.TARGET, "127.0.0.1:2", ReplicaState.CONNECTING)


@pytest.mark.parametrize(
    ("replicas", "reason"),
    [
        ([], report.STARTING),
        ([CONNECTING], report.STARTING),  # it may host a draft
        ([CONNECTING, TARGET], report.NO_DRAFT),
    ],
)
def test_a_coordinator_without_a_draft_says_so_once_it_knows_a_target(
    replicas: list[ReplicaSnapshot], reason: str
) -> None:
    state = report.of_coordinator(replicas, is_enabled=True, num_speculative_tokens=2, latest=None)
    assert state == report.off(reason)
