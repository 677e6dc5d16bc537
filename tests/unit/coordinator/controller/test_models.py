"""The parts of the controller's predictions, each alone: rates, step profiles, and seconds of rounds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.model.types import MAX_AHEAD_TOKENS, AheadBudget, Proposal, StepProfile
from tandem_coordinator.controller import Terms, request_kind, tokens_after_hit
from tandem_coordinator.outcomes import Coming
from tandem_coordinator.prediction import (
    OUTCOMES,
    PRIOR_RATE,
    ConditionalRates,
    CostModel,
    GainModel,
    ServiceSpeed,
    StepModel,
    StepSeconds,
    expected_tokens,
)
from tandem_coordinator.stats.rounds import Mode, RoundCost

PROFILE = StepProfile({(1, 1): 0.01, (1, 5): 0.014, (8, 1): 0.02, (8, 5): 0.06})


@pytest.mark.parametrize(
    ("sequences", "tokens", "seconds"),
    [(1, 1, 0.01), (1, 3, 0.012), (8, 5, 0.06), (2, 1, 0.01 + 0.01 / 7), (1, 7, 0.016), (15, 1, 0.03)],
)
def test_a_profile_is_interpolated_and_continued(sequences: int, tokens: int, seconds: float) -> None:
    assert StepModel(PROFILE).predict(sequences, tokens) == pytest.approx(seconds)


def test_sizes_that_were_not_measured_are_predicted_from_smaller_ones() -> None:
    known = StepProfile({key: seconds for key, seconds in PROFILE.seconds.items() if key != (8, 5)})
    assert StepModel(known).predict(1, 3) == pytest.approx(0.012)
    assert StepModel(known).predict(8, 1) == StepModel(known).predict(1, 1)


def test_a_step_costs_something_whatever_the_profile() -> None:
    falling = StepProfile({(1, 1): 0.01, (1, 5): 0.005, (8, 1): 0.01, (8, 5): 0.005})
    assert StepModel(falling).predict(1, 100) > 0.0


STEPS = StepSeconds([0.010, 0.011, 0.012], 0.002, target_question=0.001, draft_question=0.0005)


def test_the_parts_of_a_round_add_up() -> None:
    assert STEPS.predict_asked() == pytest.approx([0.011, 0.0145, 0.0175])
    leading = StepSeconds(STEPS.verify, STEPS.draft, STEPS.target_question, STEPS.draft_question, leads=True)
    assert leading.predict_asked() == pytest.approx([0.010, 0.0145, 0.0175])


def test_a_hit_hides_the_drafting_behind_the_verification() -> None:
    assert STEPS.predict_hits(0.003)[2] == pytest.approx(0.013)
    assert STEPS.predict_hits(0.010)[2] == pytest.approx(0.022), "the draft takes longer"
    leading = replace(STEPS, leads_proposals=True)
    assert leading.predict_hits(0.003)[2] == pytest.approx(0.012), "so is the way to the target"
    assert leading.predict_hits(0.010)[2] == pytest.approx(0.022), "but not that of a late proposal"
    assert leading.predict_hits(0.0054)[2] == pytest.approx(0.013), "nor of one that is under way too long"


def profiled() -> CostModel:
    return CostModel(ServiceSpeed(PROFILE, question=0.001), ServiceSpeed(PROFILE, question=0.002))


def test_an_unmeasured_load_has_the_ratio_of_the_nearest_one_and_an_unmeasured_mode_its_own() -> None:
    costs = profiled()
    for _ in range(40):
        costs.add_round(Mode.ASKED, 4, 0.03, 0.02)
    assert costs.ratio(Mode.ASKED, 4) == pytest.approx(1.5)
    assert costs.ratio(Mode.ASKED, 16) == pytest.approx(1.5)
    assert costs.ratio(Mode.ALONE, 4) == 1.0, "nothing tells otherwise than the profile"


def test_without_profiles_the_first_rounds_tell_how_long_a_step_takes() -> None:
    costs = CostModel(ServiceSpeed(), ServiceSpeed())
    before = costs.is_known
    costs.add_round(Mode.ASKED, 1, 0.014, 1.4)
    assert (before, costs.is_known) == (False, True)
    assert costs.ratio(Mode.ASKED, 1) == pytest.approx(0.01)
    assert costs.ratio(Mode.ALONE, 1) == pytest.approx(0.01)
    assert not costs.is_known_of(Mode.ALONE)


@pytest.mark.parametrize("number", range(6))
def test_one_pause_of_the_machine_decides_nothing(number: int) -> None:
    """Whichever of the first rounds it falls into, of one request or of eight that share the step."""
    for load in (1, 8):
        costs = profiled()
        for step in range(6):
            for _ in range(load):
                costs.add_round(Mode.ASKED, load, 0.2 if step == number else 0.02, 0.02)
            assert costs.ratio(Mode.ASKED, load) == pytest.approx(1.0)


def test_a_draft_that_says_that_its_steps_take_an_hour_is_not_believed_at_once() -> None:
    costs = profiled()
    before = costs.predict_branch_step(1, 8)
    costs.add_branch_step(1, 8, 3600.0)
    assert costs.predict_branch_step(1, 8) == before
    costs.add_branch_step(1, 8, 0.1)
    assert costs.predict_branch_step(1, 8) == pytest.approx(0.1)


def test_a_round_in_which_others_propose_or_read_a_prompt_is_not_typical() -> None:
    assert RoundCost(0, 0.5, 0.4, 4, 4).is_typical(4, 0)
    assert not RoundCost(0, 0.5, 0.4, 4, 300).is_typical(4, 0), "one reads its prompt"
    assert not RoundCost(0, 0.5, 0.4, 2, 2).is_typical(4, 0), "a draft works for the others"
    assert RoundCost(2, 0.5, 0.4, 4, 10).is_typical(4, 2), "some have a shorter proposal"
    assert not RoundCost(2, 0.5, 0.4, 4, 12, was_late=True).is_typical(4, 2)


def test_rates_are_conditional_and_start_at_the_previous_positions_rate() -> None:
    rates = ConditionalRates()
    assert rates.rates(2) == [PRIOR_RATE, PRIOR_RATE]
    for _ in range(200):
        rates.add(3, 3)
        rates.add(3, 1)
    first, second, third, fourth = rates.rates(4)
    assert first == pytest.approx(1.0, abs=0.01)
    assert second == pytest.approx(0.5, abs=0.02)
    assert third == pytest.approx(1.0, abs=0.03)
    assert fourth == third, "nothing was seen there"
    assert rates.rates(2, 0.5)[1] > second


def test_expected_tokens_are_the_sum_of_products_of_rates() -> None:
    assert expected_tokens([0.5, 0.5]) == [1.0, 1.5, 1.75]
    assert expected_tokens([]) == [1.0]


def test_hit_rates_follow_the_observed_outcomes() -> None:
    gains = GainModel()
    chance = random.Random(1)
    for _ in range(4000):
        rank = chance.choices([0, 1, 2, 3, None], [0.4, 0.2, 0.1, 0.1, 0.2])[0]
        gains.add_outcome(rank, 4)
    assert gains.hit_rate(1) == pytest.approx(0.4, abs=0.04)
    assert gains.hit_rate(4) == pytest.approx(0.8, abs=0.04)
    assert gains.hit_rate(64) >= gains.hit_rate(4)


def test_a_long_proposal_grants_no_more_than_a_draft_takes() -> None:
    """Proposals may have 128 tokens, budgets 64; a draft refuses larger budgets."""
    kind = request_kind("draft", "strict", 1.0)
    assert Terms(kind, 128, draft_ahead=8).max_budget == AheadBudget(8, MAX_AHEAD_TOKENS)
    assert Terms(kind, 3, draft_ahead="auto").max_budget == AheadBudget(OUTCOMES[-1], 3)
    assert Terms(kind, 3, draft_ahead="off").max_budget is None


@pytest.mark.parametrize(
    ("temperature", "words"),
    [(0.0, "0"), (0.2, "0-0.3"), (0.7, "0.6-0.85"), (0.8, "0.6-0.85"), (2.0, "above 1.15")],
)
def test_requests_of_one_temperature_range_share_acceptance(temperature: float, words: str) -> None:
    assert request_kind("draft", "residual", temperature).temperatures == words


def proposal_of(count: int) -> Proposal:
    return Proposal(1, (7,) * count)


_EXPECTED = [1.0, 1.75, 2.3, 2.7, 3.0]


@pytest.mark.parametrize(
    ("ready", "due_ms", "step_ms", "count"),
    [
        (2, 0.1, 0.1, 4),  # nearly free
        # 0.4 tokens for 0.2 ms, then 0.3 for 1.2 ms, where rounds make 0.3 in a millisecond
        (2, 0.2, 1.2, 3),
        (2, 1.5, 1.5, 2),  # too slow
        (4, 0.0, 0.1, 4),  # complete
    ],
)
def test_a_round_waits_after_a_hit_for_as_many_tokens_as_pay(
    ready: int, due_ms: float, step_ms: float, count: int
) -> None:
    coming = Coming(proposal_of(ready), 0, 4, due_ms / 1e3, step_ms / 1e3)
    assert tokens_after_hit(_EXPECTED, coming, tokens_per_second=300.0) == count


@given(st.integers(0, 4), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 1e4))
def test_a_wait_is_never_for_fewer_tokens_than_are_ready(
    ready: int, due: float, step: float, tokens_per_second: float
) -> None:
    found = tokens_after_hit(
        _EXPECTED, Coming(proposal_of(ready), 0, 4, due, step), tokens_per_second=tokens_per_second
    )
    assert ready <= found <= 4
