"""The law of drafts elsewhere, and the plan of a fleet that heeds groups, queues and the way."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.cli.planning import Fleet, StepTimes, elsewhere_gain, fleet_plan
from tests.commands import run_here

SATURATED = Fleet(StepTimes(0.00325, 0.012, (0.8,), per_8_rows=8.0), targets=4, drafts=2, proposed=4)
"""A target step takes 3.25 ms for each row: 65 ms for four clients."""
WORDS = ("plan", "--verify-ms", "3.25", "--draft-step-ms", "12", "--acceptance", "0.8", "--per-8-rows", "8")

seconds = st.floats(1e-4, 1.0)


def test_the_law_of_a_pair_of_the_docs() -> None:
    assert elsewhere_gain(4, 1.5, 22.0) == pytest.approx(1.2727, abs=1e-4)
    assert elsewhere_gain(0, 1.5, 22.0) == 1.0


@given(st.integers(1, 16), seconds, seconds)
def test_the_law_is_the_share_of_a_device_that_drafting_takes(k: int, draft: float, verify: float) -> None:
    together = verify + k * draft
    assert elsewhere_gain(k, draft, verify) == pytest.approx(together / verify)


@settings(deadline=None)
@given(
    k=st.integers(1, 8),
    draft=st.floats(0.001, 0.02),
    row=st.floats(0.0005, 0.005),
    clients=st.integers(4, 64),
)
def test_a_saturated_fleet_never_beats_the_law(k: int, draft: float, row: float, clients: int) -> None:
    fleet = Fleet(StepTimes(row, draft, (0.8,), per_8_rows=8.0), targets=4, drafts=4, proposed=k)
    found = fleet_plan(fleet, clients)
    assert (
        found.clients <= found.law * clients + 4 * 1e-6 or clients < 8
    )  # a target with one client has no groups


@settings(deadline=None)
@given(clients=st.integers(4, 200), drafts=st.integers(1, 8), trip=st.floats(0.0, 0.01))
def test_more_clients_are_never_quicker_and_more_drafts_never_slower(
    clients: int, drafts: int, trip: float
) -> None:
    fleet = replace(SATURATED, times=replace(SATURATED.times, round_trip_seconds=trip), draft_per_8_rows=0.5)
    period = fleet.period_seconds(clients, drafts)
    assert fleet.period_seconds(clients, drafts + 1) <= period * 1.001
    assert fleet.period_seconds(clients + 4, drafts) >= period * 0.999


def test_a_saturated_fleet_reaches_the_law_but_for_whole_clients() -> None:
    found = fleet_plan(SATURATED, 16)
    assert found.law == pytest.approx(1 + 4 * 12 / 65)
    assert found.clients == 27  # the law: 27.8
    assert found.rate == pytest.approx(SATURATED.tokens_per_round / 0.113)


def test_few_drafts_with_costly_batches_are_not_enough() -> None:
    costly = replace(SATURATED, drafts=1, draft_per_8_rows=4.0)
    few, many = fleet_plan(costly, 16), fleet_plan(replace(costly, drafts=8), 16)
    assert few.clients < many.clients
    assert few.drafts_needed is not None
    assert few.drafts_needed > 1


def test_without_drafts_each_token_takes_a_step() -> None:
    alone = replace(SATURATED, drafts=1)
    assert alone.period_seconds(16, 0) == pytest.approx(4 * 0.00325 * alone.tokens_per_round)
    assert fleet_plan(alone, 16).rate_with_one_less == pytest.approx(
        1 / (fleet_plan(alone, 16).clients / 4 * 0.00325)
    )


def test_the_command_says_what_a_fleet_serves() -> None:
    out = run_here(*WORDS, "--fleet", "4,2,16,4").stdout
    assert "16 clients at 29.7 tokens/s each (K = 4)" in out
    assert "27 clients at that rate, 1.69x; the law for saturated targets says 1.74x" in out
    assert json.loads(run_here(*WORDS, "--fleet", "4,2,16,4", "-o", "json").stdout)["clients"] == 27


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((*WORDS, "--fleet", "4,2"), "--fleet is 4,2; it must be TARGETS,DRAFTS,CLIENTS"),
        ((*WORDS, "--fleet", "4,0,16"), "--fleet is 4,0,16; it must be"),
        (("plan", "--fleet", "4,2,16"), "--fleet was given without --verify-ms"),
    ],
)
def test_a_bad_fleet_is_refused(words: tuple[str, ...], sentence: str) -> None:
    ran = run_here(*words)
    assert ran.returncode == 2
    assert sentence in ran.stderr
