"""The cost model, the gain model and the prediction of drafting ahead, each alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.model.types import MAX_AHEAD_TOKENS, AheadBudget, StepProfile
from tandem_coordinator.speculation.ahead import (
    OUTCOMES,
    Unfinished,
    best_count,
    max_budget,
    tokens_after_hit,
)
from tandem_coordinator.speculation.costs import CostModel, ServiceCosts, Way
from tandem_coordinator.speculation.gains import (
    FIRST_RATE,
    ConditionalRates,
    GainModel,
    RequestAcceptance,
    expected_tokens,
)
from tandem_coordinator.stats.rounds import RoundCost

PROFILE = StepProfile({(1, 1): 0.01, (1, 5): 0.014, (8, 1): 0.02, (8, 5): 0.06})


@pytest.mark.parametrize(
    ("sequences", "tokens", "seconds"),
    [(1, 1, 0.01), (1, 3, 0.012), (8, 40, 0.06), (2, 2, 0.01 + 0.01 / 7), (1, 7, 0.016), (15, 15, 0.03)],
)
def test_a_profile_is_interpolated_and_continued(sequences: int, tokens: int, seconds: float) -> None:
    assert ServiceCosts(PROFILE).seconds(sequences, tokens) == pytest.approx(seconds)


def test_sizes_that_were_not_measured_are_predicted_from_smaller_ones() -> None:
    known = StepProfile({key: seconds for key, seconds in PROFILE.seconds.items() if key != (8, 5)})
    assert ServiceCosts(known).seconds(1, 3) == pytest.approx(0.012)
    assert ServiceCosts(known).seconds(8, 8) == ServiceCosts(known).seconds(1, 1)


def test_a_step_of_fewer_sequences_costs_something_whatever_the_profile() -> None:
    falling = StepProfile({(1, 1): 0.01, (1, 5): 0.005, (8, 1): 0.01, (8, 5): 0.005})
    assert ServiceCosts(falling).seconds(1, 100) > 0.0


def test_without_a_profile_the_first_steps_give_the_level() -> None:
    costs = ServiceCosts()
    assert not costs.is_known
    for _ in range(3):
        costs.add(4, 4, 0.3, 0.25)
    assert costs.seconds(4, 4) == pytest.approx(0.3)
    assert costs.seconds(1, 1) == pytest.approx(0.3)


def test_a_cold_step_counts_once() -> None:
    """The first steps of a request take twice as long as later ones; a profile weighs as much as two steps."""
    costs = ServiceCosts(PROFILE)
    costs.add(1, 1, 0.02, 1.0)
    assert costs.seconds(1, 1) == pytest.approx(0.0125, rel=0.02)


def test_a_step_of_fewer_tokens_takes_no_longer() -> None:
    """However long ago it was measured: while all draft, steps without proposals are not."""
    for tokens, taken in ((5, 0.004), (1, 0.03)):
        costs = ServiceCosts(PROFILE)
        for _ in range(100):
            costs.add(1, tokens, taken, 1.0)
        seconds = [costs.seconds(1, each) for each in range(1, 6)]
        assert seconds == sorted(seconds)
        assert seconds[tokens - 1] == pytest.approx(taken, rel=0.1)


def test_a_miss_costs_the_question_that_follows_it() -> None:
    costs = _costs(1e-3)
    before = costs.seconds_ahead(4, _EXPECTED, 1e-3, 0.5)
    for _ in range(100):
        costs.add_rest(Way.MISSED, 4, costs.rest_seconds(Way.MISSED, 4) + 1e-3)
    assert costs.seconds_ahead(4, _EXPECTED, 1e-3, 0.5) > 1.1 * before


def round_of(load: int, proposed: int) -> RoundCost:
    """A round on a machine whose steps take 10 ms and 0.1 ms for each token."""
    verify, draft = 0.01 + 0.0001 * load * (proposed + 1), 0.002 * proposed
    seconds = verify + draft + (0.001 if proposed else 0.0005)
    return RoundCost(proposed, seconds, verify, load, load * (proposed + 1), draft, load)


def test_the_parts_of_a_round_add_up() -> None:
    model = CostModel(ServiceCosts(PROFILE, 0.001), ServiceCosts(PROFILE, 0.002))
    assert model.seconds(1, 0) == pytest.approx(0.01 + 2 * 0.001), "a question takes two health checks"
    assert model.seconds(1, 2) == pytest.approx(0.012 + 2 * 0.01 + 2 * 0.003)
    assert model.seconds(2, 2) == pytest.approx(
        model.verify_seconds(2, 2) + 2 * model.draft_seconds(2) + 2 * 0.003 + model.verify_seconds(2, 0) / 2
    ), "and what comes back from the draft waits for a step of others"
    for _ in range(60):
        model.add(1, round_of(1, 2))
    assert model.rest_seconds(Way.DRAFTED, 1) == pytest.approx(0.001, abs=1e-4)
    assert model.rest_seconds(Way.ASKED, 1) == pytest.approx(0.0005, abs=1e-4), (
        "no such round yet: half of the messages"
    )


def test_a_step_shared_with_prompts_does_not_count_as_a_round() -> None:
    alone = RoundCost(0, 0.5, 0.4, 4, 300)
    assert not alone.is_uniform(alone.verify_sequences)
    model = CostModel(ServiceCosts(), ServiceCosts())
    for _ in range(40):
        model.add(4, round_of(4, 0))
    before = model.rest_seconds(Way.ASKED, 4)
    model.add(4, alone)
    assert model.rest_seconds(Way.ASKED, 4) == before


def test_a_step_in_which_few_propose_tells_what_waiting_costs_but_not_what_the_target_takes_alone() -> None:
    model = CostModel(ServiceCosts(PROFILE, 0.001), ServiceCosts(PROFILE, 0.002))
    alone = model.verify_seconds(16, 0)
    for _ in range(60):
        model.add(16, RoundCost(2, 0.1, 0.05, 16, 18, 0.02, 1))
    assert model.verify_seconds(16, 0) == alone
    assert model.rest_seconds(Way.DRAFTED, 16) == pytest.approx(0.03, rel=0.1)
    for _ in range(60):
        model.add(16, RoundCost(2, 0.2, 0.05, 16, 200, 0.02, 1))
    assert model.rest_seconds(Way.DRAFTED, 16) == pytest.approx(0.03, rel=0.1), (
        "of a step that reads a prompt"
    )


def test_rates_are_conditional_and_start_at_the_previous_positions_rate() -> None:
    gains = ConditionalRates()
    assert gains.rates(2) == [FIRST_RATE, FIRST_RATE]
    for _ in range(200):
        gains.add(3, 3)
        gains.add(3, 1)
    first, second, third, fourth = gains.rates(4)
    assert first == pytest.approx(1.0, abs=0.01)
    assert second == pytest.approx(0.5, abs=0.02)
    assert third == pytest.approx(1.0, abs=0.03)
    assert fourth == third, "nothing was seen there"


def test_expected_tokens_are_the_sum_of_products_of_rates() -> None:
    assert expected_tokens([0.5, 0.5]) == [1.0, 1.5, 1.75]
    assert expected_tokens([]) == [1.0]
    assert expected_tokens([0.8], 0.5) == [1.0, 1.4]


def test_a_requests_own_acceptance_is_separate_from_the_common_one() -> None:
    poor, usual = RequestAcceptance(), RequestAcceptance()
    for _ in range(40):
        poor.add(2, 0, [0.8, 0.8])
        usual.add(2, 2, [1.0, 1.0])
    assert poor.scale < 0.6
    assert usual.scale == pytest.approx(1.0)
    for _ in range(8):
        poor.forget()
    assert poor.scale == pytest.approx(1.0, abs=0.02)


def test_the_way_to_a_target_that_leads_costs_only_rounds_with_a_proposal() -> None:
    model = CostModel(ServiceCosts(PROFILE, 0.001), ServiceCosts(PROFILE, 0.002), leads=True)
    assert model.seconds(1, 0) == pytest.approx(0.01)
    assert model.seconds(1, 2) == pytest.approx(0.012 + 2 * 0.01 + 2 * 0.003)
    asked = round_of(1, 0)
    model.add(1, asked)
    assert model.rest_seconds(Way.LED, 1) == 0.0, "it was asked for, as the first round alone is"
    assert model.rest_seconds(Way.ASKED, 1) == pytest.approx(0.00125), (
        "the first counts as much as what was predicted"
    )
    model.add(1, replace(asked, seconds=asked.verify_seconds + 0.0001, was_led=True))
    assert model.rest_seconds(Way.LED, 1) == pytest.approx(0.00005)
    assert model.seconds(1, 0) == pytest.approx(model.verify_seconds(1, 0) + 0.00005)
    model.add(1, replace(asked, seconds=asked.verify_seconds + 0.5, was_led=True))
    assert model.rest_seconds(Way.LED, 1) < 0.002, "a pause is no cost"


def test_a_target_that_leads_is_slow_only_where_many_of_its_answers_are_late() -> None:
    model = CostModel(ServiceCosts(PROFILE, 0.001), ServiceCosts(PROFILE, 0.002), leads=True)
    leading = replace(round_of(16, 0), was_led=True)
    for late in (0.02, 0.0):
        model.add(16, replace(leading, seconds=leading.verify_seconds + late))
    assert model.rest_seconds(Way.LED, 16) < 0.001
    for _ in range(120):
        model.add(16, replace(leading, seconds=leading.verify_seconds + 0.004))
    assert model.rest_seconds(Way.LED, 16) == pytest.approx(0.004, rel=0.06)


def test_a_first_round_is_cold_and_counts_little() -> None:
    model = CostModel(ServiceCosts(PROFILE, 0.001), ServiceCosts(PROFILE, 0.002))
    expected = model.rest_seconds(Way.DRAFTED, 16)
    model.add_rest(Way.DRAFTED, 16, 0.003)
    assert model.rest_seconds(Way.DRAFTED, 16) > 0.9 * expected


_EXPECTED = [1.0, 1.75, 2.3, 2.7, 3.0]


def _costs(
    draft_seconds: float, per_row: float = 0.0125, *, trip: float = 0.25e-3, leads: bool = False
) -> CostModel:
    sizes = [(sequences, tokens) for sequences in (1, 8) for tokens in (1, 9)]
    verify = StepProfile(dict.fromkeys(sizes, 6.5e-3))
    draft = StepProfile({(n, k): draft_seconds * (1.0 + per_row * (n * k - 1)) for n, k in sizes})
    return CostModel(ServiceCosts(verify, trip), ServiceCosts(draft, trip), leads)


def _best(costs: CostModel, gains: GainModel) -> int:
    def seconds(count: int) -> float:
        return costs.seconds_ahead(1, _EXPECTED, costs.draft_seconds(1, count), gains.hit_rate(count))

    return min(OUTCOMES, key=seconds)


def test_a_fast_draft_serves_many_outcomes_and_a_slow_one_few() -> None:
    assert _best(_costs(0.3e-3), GainModel()) == 16
    assert _best(_costs(1.2e-3, per_row=0.25), GainModel()) <= 4


def test_outcomes_that_never_come_are_not_drafted_for() -> None:
    gains = GainModel()
    for _ in range(500):
        gains.add_outcome(0, 16)
    assert gains.hit_rate(1) > 0.9
    assert _best(_costs(1.0e-3, per_row=1.0), gains) == 1


def test_hit_rates_follow_the_observed_outcomes() -> None:
    gains, chance = GainModel(), random.Random(1)
    for _ in range(4000):
        rank = chance.choices([0, 1, 2, 3, None], [0.4, 0.2, 0.1, 0.1, 0.2])[0]
        gains.add_outcome(rank, 4)
    assert gains.hit_rate(1) == pytest.approx(0.4, abs=0.04)
    assert gains.hit_rate(4) == pytest.approx(0.8, abs=0.04)
    assert gains.hit_rate(64) >= gains.hit_rate(4)


def test_a_long_proposal_grants_no_more_than_a_draft_takes() -> None:
    """Proposals may have 128 tokens, budgets 64; a draft refuses larger budgets."""
    assert max_budget(8, 128) == AheadBudget(8, MAX_AHEAD_TOKENS)
    assert max_budget("auto", 3) == AheadBudget(OUTCOMES[-1], 3)
    assert max_budget("off", 3) is None


@pytest.mark.parametrize(
    ("draft_ms", "tokens_per_second", "count"), [(0.1, 300.0, 4), (1.2, 300.0, 3), (4.0, 300.0, 0)]
)
def test_a_round_asks_after_a_miss_for_as_many_tokens_as_pay(
    draft_ms: float, tokens_per_second: float, count: int
) -> None:
    def waited(tokens: int) -> float:
        return 0.5e-3 + tokens * draft_ms / 1e3 if tokens else 0.0

    assert best_count(range(5), _EXPECTED, waited, tokens_per_second) == count


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
    unfinished = Unfinished(ready, 4, due_ms / 1e3, step_ms / 1e3)
    assert tokens_after_hit(_EXPECTED, unfinished, tokens_per_second=300.0) == count


@given(st.integers(0, 4), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 1e4))
def test_a_wait_is_never_for_fewer_tokens_than_are_ready(
    ready: int, due: float, step: float, tokens_per_second: float
) -> None:
    found = tokens_after_hit(_EXPECTED, Unfinished(ready, 4, due, step), tokens_per_second=tokens_per_second)
    assert ready <= found <= 4


def test_a_target_that_goes_on_with_proposals_hides_the_way_to_it() -> None:
    """Unless the draft, which learns outcomes that much later, takes longer than the verification."""

    def speed(draft_seconds: float, *, leads: bool) -> float:
        costs = _costs(draft_seconds, trip=0.5e-3, leads=leads)
        step = costs.draft_seconds(1, 4)
        return 1.0 / costs.seconds_ahead(1, _EXPECTED, step, GainModel().hit_rate(4), leads=leads)

    assert speed(0.8e-3, leads=True) > 1.01 * speed(0.8e-3, leads=False)
    assert speed(6.0e-3, leads=True) == pytest.approx(speed(6.0e-3, leads=False))


def test_a_draft_that_says_that_its_steps_take_an_hour_does_not_make_drafting_ahead_free() -> None:
    """Rounds that take less than such steps earn no credit for later ones."""
    costs = _costs(1.2e-3)
    for _ in range(50):
        costs.add_rest(Way.AHEAD, 1, -3600.0)
    assert costs.rest_seconds(Way.AHEAD, 1) >= -costs.verify_seconds(1, 0)


def test_three_tokens_in_time_for_a_target_that_goes_on_make_less_than_four_that_it_waits_for() -> None:
    """A round that the draft is late for is asked for; it does not cost each token of the proposal once more."""
    costs = _costs(1.2e-3, per_row=0.0, trip=1.3e-3, leads=True)
    three, four = (
        made[-1] / costs.seconds_ahead(1, made, 1.2e-3, 0.96, leads=True)
        for made in (_EXPECTED[:4], _EXPECTED)
    )
    assert four > three
