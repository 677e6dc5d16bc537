"""`tandem plan`: the pair that it measures, its table, and the plan of a fleet with drafts elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import ConfigurationError
from tandem.model.speculation_state import SpeculationDecision
from tandem_coordinator.cli.plan import (
    Fleet,
    PairOptions,
    StepTimes,
    break_even,
    fleet_plan,
    measured_rounds,
    plan,
)
from tests.commands import run_here


def test_the_demo_pair_is_measured_unless_another_is_named(tmp_path: Path) -> None:
    folder = str(tmp_path)
    for options, named in (
        (PairOptions(target="demo"), ["--model", "demo"]),
        (PairOptions(draft="ngram"), ["--model", "demo", "--draft", "ngram"]),
        (PairOptions(target=folder), ["--target", folder]),
        (PairOptions(target=folder, draft=folder), ["--target", folder, "--draft", folder]),
        (PairOptions(target="demo", max_length=64), ["--model", "demo", "--max-length", "64"]),
    ):
        assert options.is_named
        fixed = ["--no-http", "--port", "0", "--draft-ahead", "off", "--device", "cpu"]
        assert options.up_words() == [*fixed, *named]
    assert not PairOptions().is_named


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (PairOptions(target="demo", draft="none"), "--draft is none"),
        (PairOptions(target="/nowhere"), "--target is /nowhere"),
        (PairOptions(target="demo", draft="/nowhere"), "--draft is /nowhere"),
    ],
)
def test_unmeasurable_pairs_are_refused_before_anything_starts(options: PairOptions, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        options.up_words()


# ---- the table

FIGURES = StepTimes(0.0065, 0.0012, (0.8,), per_8_rows=0.0)


def test_without_messages_the_speedup_is_the_usual_formula() -> None:
    """(1 + E[accepted]) / (cost_draft x K + cost_verify), in units of a verification."""
    for row in plan(FIGURES.rounds(1), 1).lengths:
        expected = sum(0.8**i for i in range(row.tokens + 1)) / (row.tokens * 1.2 / 6.5 + 1.0)
        assert row.speedup == pytest.approx(expected)
        assert row.speedup_without_wire == pytest.approx(expected)


def test_at_the_break_even_acceptance_drafting_begins_to_pay() -> None:
    rate = break_even(FIGURES.rounds(1, 8))
    assert rate is not None
    assert plan(replace(FIGURES, acceptance_rates=(rate - 0.01,)).rounds(1, 8), 1).best_tokens == 0
    assert plan(replace(FIGURES, acceptance_rates=(rate + 0.01,)).rounds(1, 8), 1).best_tokens > 0
    assert break_even(replace(FIGURES, draft_step_seconds=1.0).rounds(1, 8)) is None


def test_every_remedy_helps_and_the_most_helpful_comes_first() -> None:
    found = plan(replace(FIGURES, round_trip_seconds=0.004).rounds(1, 8), 1)
    gains = [each.speedup for each in found.remedies]
    assert gains == sorted(gains, reverse=True)
    assert all(each.speedup >= found.best_speedup for each in found.remedies if "ahead" not in each.remedy)


def test_nobody_is_told_to_draft_ahead_with_a_head() -> None:
    rounds = FIGURES.rounds(1, 8)
    headed = replace(rounds, steps=replace(rounds.steps, has_head=True))
    assert any("ahead" in each.remedy for each in plan(rounds, 1).remedies)
    assert not any("ahead" in each.remedy for each in plan(headed, 1).remedies)


@pytest.mark.parametrize("alone", [0.0, 0.001])
def test_a_clusters_plan_uses_its_predicted_rounds(alone: float) -> None:
    """0: a target that leads begins the next round before it is asked."""
    decision = SpeculationDecision(
        "t", "d", "residual", "0.85-1.15", 4, 2, 2, 1.2, 0.0, 0.0, (0.010, 0.013, 0.015), (0.8, 0.6), 0.001, 0.002,
        alone_message_seconds=alone,
    )  # fmt: skip
    found = plan(measured_rounds(decision), 4)
    assert [row.round_seconds for row in found.lengths] == pytest.approx([0.010, 0.013, 0.015])
    assert found.lengths[2].speedup == pytest.approx((1 + 0.8 + 0.48) * 0.010 / 0.015)
    assert found.lengths[2].speedup_without_wire == pytest.approx((1 + 0.8 + 0.48) * (0.010 - alone) / 0.013)


# ---- a fleet: the law of drafts elsewhere, and what it leaves out

SATURATED = Fleet(StepTimes(0.00325, 0.012, (0.8,), per_8_rows=8.0), targets=4, drafts=2, proposed=4)
"""A target step takes 3.25 ms for each row: 65 ms for four clients."""
WORDS = ("plan", "--verify-ms", "3.25", "--draft-step-ms", "12", "--acceptance", "0.8", "--per-8-rows", "8")


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


@given(clients=st.integers(4, 200), drafts=st.integers(1, 8), trip=st.floats(0.0, 0.01))
def test_more_clients_are_never_quicker_nor_more_drafts_slower(
    clients: int, drafts: int, trip: float
) -> None:
    fleet = replace(SATURATED, times=replace(SATURATED.times, round_trip_seconds=trip), draft_per_8_rows=0.5)
    period = fleet.period_seconds(clients, drafts)
    assert fleet.period_seconds(clients, drafts + 1) <= period * 1.001
    assert fleet.period_seconds(clients + 4, drafts) >= period * 0.999


def test_few_drafts_with_costly_batches_are_not_enough() -> None:
    costly = replace(SATURATED, drafts=1, draft_per_8_rows=4.0)
    few = fleet_plan(costly, 16)
    many = fleet_plan(replace(costly, drafts=8), 16)
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
        ((*WORDS, "--fleet", "4,2"), "--fleet is '4,2'; it must be TARGETS,DRAFTS,CLIENTS"),
        ((*WORDS, "--fleet", "4,0,16"), "--fleet is '4,0,16'; it must be"),
        (("plan", "--fleet", "4,2,16"), "--fleet was given without --verify-ms"),
    ],
)
def test_a_bad_fleet_is_refused(words: tuple[str, ...], sentence: str) -> None:
    ran = run_here(*words)
    assert ran.returncode == 2
    assert sentence in ran.stderr
