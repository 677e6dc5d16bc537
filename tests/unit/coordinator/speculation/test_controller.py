"""Decisions of the controller, round by round, and how it explains them."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest

from tandem.model.replica import ReplicaSnapshot, ReplicaState, Role
from tandem.model.speculation_state import DecidingFigure, SpeculationState
from tandem.model.types import AheadBudget, ModelInfo, SpeculationStats, StepProfile
from tandem_coordinator.speculation import report
from tandem_coordinator.speculation.controller import (
    TURN_ROUNDS,
    RequestSpeculation,
    SpeculationController,
    Terms,
)
from tandem_coordinator.speculation.gains import TEMPERATURE_RANGES, WINDOW, RequestKind, request_kind
from tandem_coordinator.stats.rounds import RoundCost
from tests.unit.coordinator.cli import samples
from tests.unit.coordinator.round_results import round_result

KIND = request_kind("draft", "residual", 1.0)
K = 4


def begun(controller: SpeculationController, kind: RequestKind = KIND, **options: Any) -> RequestSpeculation:
    request = RequestSpeculation(controller, Terms(kind, K, **options))
    request.target = "target"
    return request


def simulate(
    request: RequestSpeculation, rounds: int, draft: float, accepted: int, load: int = 1
) -> list[int]:
    """Return the proposal lengths of rounds with a verification of 10 ms and this relative cost of a proposed token."""
    lengths = []
    for _ in range(rounds):
        proposed = request.begin_round(load)
        lengths.append(proposed)
        drafting = 0.01 * draft * proposed
        tokens = load * (proposed + 1)
        seconds = 0.0101 + drafting
        cost = RoundCost(proposed, seconds, 0.01, load, tokens, drafting, load)
        request.end_round(round_result(proposed, min(accepted, proposed), cost))
    return lengths


def test_profiles_decide_before_the_first_round() -> None:
    for step, expected in ((0.0005, K), (0.02, 0)):
        controller = profiled(step)
        request = begun(controller)
        assert request.begin_round(1) == expected
        (decision,) = controller.decisions()
        assert decision.draft_step_seconds == pytest.approx(step)


def model_of(step_seconds: float, version: int = 0, *, many: float | None = None) -> ModelInfo:
    """A model whose steps take so long, and those of 32 sequences as long as `many` says."""
    seconds = {1: step_seconds, 32: step_seconds if many is None else many}
    profile = StepProfile({(size, tokens): seconds[size] for size in seconds for tokens in (1, 9)}, version)
    return ModelInfo("model", "", 10, "", 100, "", step_profile=profile)


def profiled(draft_seconds: float, *, many: float | None = None) -> SpeculationController:
    """A controller that knows a target with steps of 10 ms, and a draft whose steps take so long."""
    controller = SpeculationController()
    controller.introduce("target", model_of(0.01), 0.0001)
    controller.introduce("draft", model_of(draft_seconds, many=many), 0.0001)
    return controller


def draft_ahead_and_miss(request: RequestSpeculation, proposed: int, seconds: float, alone: float) -> None:
    """A round that drafts ahead, and one of the target alone after its miss."""
    request.begin_round(1)
    cost = RoundCost(proposed, seconds, 0.011, 1, proposed + 1)
    request.end_round(round_result(proposed, min(proposed, 2), cost, awaited=True))
    request.begin_round(1)
    request.end_round(round_result(0, 0, RoundCost(0, alone, 0.01, 1, 1)))


def test_a_fixed_length_request_keeps_its_length_and_informs_the_others() -> None:
    controller = SpeculationController()
    fixed = begun(controller, is_adaptive=False)
    assert set(simulate(fixed, 300, 0.5, 0)) == {K}
    (decision,) = controller.decisions()
    assert (decision.num_speculative_tokens, decision.best_draft_length) == (K, K)
    assert 0.0 < decision.gain < 1.0
    assert simulate(begun(controller), 20, 0.5, 0).count(0) > 15


def test_a_burst_is_decided_at_the_load_that_it_will_be() -> None:
    """A draft that does not pay at 16 requests would read the prompts of the first ones in vain."""
    controller = profiled(0.0005, many=0.02)
    running = begun(controller)
    running.begin_round(1)
    requests = [begun(controller) for _ in range(32)]
    assert {request.begin_round(1) for request in requests} == {0}
    assert running.begin_round(1) == K, "its load is known, and the others may be on another target"
    for request in requests:
        request.begin_round(32)
    assert controller.beginning == 0
    alone = begun(controller)
    assert alone.begin_round(1) == K
    alone.end()
    alone.end()
    assert controller.beginning == 0


def test_requests_of_one_temperature_range_share_acceptance() -> None:
    def index(temperature: float) -> int:
        return request_kind("draft", "residual", temperature).temperature_range

    assert index(0.0) != index(0.2)
    assert index(0.7) == index(0.8)
    assert index(2.0) == len(TEMPERATURE_RANGES)


def test_a_new_temperature_range_begins_with_the_nearest_ones_first_rate() -> None:
    controller = SpeculationController()
    simulate(begun(controller, is_adaptive=False), 100, 0.1, 0)
    near = request_kind("draft", "residual", 0.7)
    far = request_kind("other draft", "residual", 1.0)
    assert controller.gains(near).acceptance.rates(1)[0] < 0.1
    assert controller.gains(far).acceptance.rates(1)[0] > 0.5


def test_a_fixed_number_of_outcomes_is_always_drafted_for() -> None:
    controller = SpeculationController()
    request = begun(controller, draft_ahead=8)
    assert request.begin_round(1) == K
    assert request.ahead_budget == AheadBudget(8, K)
    (decision,) = controller.decisions()
    assert decision.reason == f"batch 1: K = {K}, ahead 8, nothing was measured yet"
    fixed = begun(controller, request_kind("draft", "strict", 1.0), draft_ahead=8, is_adaptive=False)
    for _ in range(100):
        simulate(fixed, 1, 0.05, 0, load=4)
        assert fixed.begin_round(4) == K
        assert fixed.ahead_budget == AheadBudget(8, K)


@pytest.mark.parametrize("proposed", [K, 1])
def test_rounds_that_draft_ahead_are_predicted_as_fast_as_they_are_with_those_alone_after_misses(
    proposed: int,
) -> None:
    """Also where the draft has fewer tokens in time than rounds may propose."""
    controller = profiled(0.001)
    request = begun(controller, draft_ahead=8, is_adaptive=False)
    for _ in range(200):
        draft_ahead_and_miss(request, proposed, 0.016, 0.012)
    assert request.choice is not None
    made = request.choice.expected[proposed] + 1.0
    assert request.choice.tokens_per_second[K] == pytest.approx(made / (0.016 + 0.012), rel=0.1)


@pytest.mark.parametrize("accepted", [0, K])
def test_what_the_tokens_tell_of_an_unknown_draft_is_only_watched(accepted: int) -> None:
    """Nobody proposes before drafting is sure to pay; a draft that does not is never tried at all."""
    controller = profiled(0.001)
    kind = request_kind("draft", "strict", 1.0)
    requests = [begun(controller, kind, draft_ahead="auto") for _ in range(4)]
    watched = 0
    for _ in range(60):
        for request in requests:
            count = request.begin_round(4)
            assert not count or watched >= TURN_ROUNDS
            watched += request.watched_tokens > 0
            request.came(request.watched_tokens, min(accepted, request.watched_tokens))
            cost = RoundCost(count, 0.011 + 0.001 * count, 0.01, 4, 4 * (1 + count), 0.001 * count, 4)
            request.end_round(round_result(count, min(accepted, count), cost))
    assert watched < 40
    assert [request.tokens > 0 for request in requests] == [accepted > 0] * 4


def test_where_few_proposals_leave_it_open_one_request_goes_on_watching() -> None:
    """Rounds beside a draft that all ask are not of the target alone, and do not tell what it takes."""
    controller = profiled(0.004)
    kind = request_kind("draft", "strict", 1.0)
    requests = [begun(controller, kind, draft_ahead="auto") for _ in range(4)]
    watching = []
    for number in range(20):
        for request in requests:
            assert not request.begin_round(4)
        watching.append(sum(request.watched_tokens > 0 for request in requests))
        for request in requests:
            request.came(request.watched_tokens, min(K, request.watched_tokens) * (number % 2 == 0))
            request.end_round(
                round_result(0, 0, RoundCost(0, 0.02 if watching[-1] == 4 else 0.011, 0.01, 4, 4))
            )
    assert 4 in watching
    assert watching[-4:] == [1] * 4
    assert controller.costs("target", "draft").seconds(4, 0) == pytest.approx(0.011, rel=0.01)


@pytest.mark.parametrize("others", [0, 3])
def test_a_request_follows_its_own_acceptance_only_beside_others(others: int) -> None:
    """All that is known of a lone one's text is what all know, and it goes on learning that."""
    controller = SpeculationController()
    simulate(begun(controller, is_adaptive=False), 600, 0.6, K, load=4)
    request, *beside = [begun(controller) for _ in range(1 + others)]
    for each in (request, *beside):
        each.begin_round(4)
    simulate(request, 2 * WINDOW, 0.6, 1, load=4)
    assert request.choice is not None
    assert request.choice.plan.tokens
    assert (request.tokens == request.choice.plan.tokens) == (not others)


def test_a_draft_that_cannot_pay_is_not_tried_at_once() -> None:
    assert not any(simulate(begun(profiled(0.02)), 100, 2.0, K))


def test_a_way_that_lost_much_does_not_keep_another_waiting() -> None:
    """Each way has its own pause. With one for all, what the last turn had lost kept the better way waiting."""
    request = begun(profiled(0.008), draft_ahead="auto")
    ahead: list[bool] = []
    for _ in range(500):
        proposed = request.begin_round(1)
        drafts_ahead = request.ahead_budget is not None
        ahead += [drafts_ahead] if proposed else []
        drafting = 0.0 if drafts_ahead else 0.008 * proposed
        seconds = 0.0101 + (0.004 if drafts_ahead else drafting)
        cost = RoundCost(proposed, seconds, 0.01, 1, proposed + 1, drafting, 1)
        request.end_round(round_result(proposed, 0, cost, awaited=drafts_ahead))
    assert ahead[: 2 * TURN_ROUNDS] == [False] * TURN_ROUNDS + [True] * TURN_ROUNDS


def test_a_newer_profile_replaces_what_was_known() -> None:
    controller = profiled(0.0005)
    controller.gains(KIND).acceptance.add(K, K)
    assert begun(controller).begin_round(1) == K
    controller.introduce("draft", model_of(0.02), 0.0001)
    assert begun(controller).begin_round(1) == K, "the same version: nothing new"
    controller.introduce("draft", model_of(0.02, version=1), 0.0001)
    assert [begun(controller).begin_round(1) for _ in range(TURN_ROUNDS)][-1] == 0


@pytest.mark.parametrize("leads", [False, True])
def test_a_predicted_gain_is_at_most_what_a_whole_proposal_makes(leads: bool) -> None:
    """Rounds of the target alone that waited for others, under load, do not make drafting pay more than it can."""
    controller = profiled(0.0005)
    request = begun(controller, leads=leads)
    alone = 0
    for _ in range(800):
        proposed = request.begin_round(4)
        alone += not proposed
        seconds = 0.012 if proposed else 0.2
        cost = RoundCost(proposed, seconds, 0.01, 4, 4 * (proposed + 1), 0.0005 * proposed, 4)
        cost.was_led = leads and not proposed
        request.end_round(round_result(proposed, min(proposed, 1), cost))
        for decision in controller.decisions():
            assert decision.gain <= K + 1, decision.reason
    assert alone >= 4, "some rounds tried it"
    (decision,) = controller.decisions()
    assert decision.num_speculative_tokens > 0
    assert decision.measured_seconds < 1.5 * decision.predicted_seconds, "of rounds as they were chosen to be"


def test_each_target_has_its_own_cost_model() -> None:
    controller = SpeculationController()
    slow, fast = begun(controller), begun(controller)
    slow.target, fast.target = "slow", "fast"
    simulate(slow, 300, 0.05, 2)
    lengths = simulate(fast, 300, 2.0, 2)
    assert lengths[-40:].count(0) > 35
    assert slow.begin_round(1) > 0


def test_auto_chooses_the_rule_with_the_most_tokens_once_each_is_measured() -> None:
    controller = SpeculationController()
    names = ("strict", "block", "residual")
    accepted = {"block": 2, "strict": 4, "residual": 1}
    chosen = []
    for _ in range(40):
        name = controller.choose_rule(names, "draft", 1.0, 1)
        chosen.append(name)
        request = begun(controller, request_kind("draft", name, 1.0), is_adaptive=False)
        simulate(request, 60, 0.05, accepted[name])
        request.end()
    assert set(chosen[10:]) == {"strict"}


@pytest.mark.parametrize("is_adaptive", [False, True])
@pytest.mark.parametrize(("beside_seconds", "expected"), [(0.0003, K), (0.015, 0)])
def test_a_question_that_takes_long_beside_its_steps_is_not_asked_after_a_miss(
    is_adaptive: bool, beside_seconds: float, expected: int
) -> None:
    """The draft may be busy with branches of the outcomes that did not come."""
    request = begun(SpeculationController(), is_adaptive=is_adaptive)
    simulate(request, 60, 0.1, K)
    for _ in range(20):
        request.asked_after_miss(K, K * 0.001 + beside_seconds)
    assert request.tokens_after_miss(K) == expected


@pytest.mark.parametrize("load", [1, 4])
@pytest.mark.parametrize("leads", [False, True])
def test_of_equal_acceptance_the_rule_wins_under_which_the_target_leads_while_it_drafts(
    leads: bool, load: int
) -> None:
    controller = SpeculationController()
    controller.introduce("target", model_of(0.006), 0.0005)
    controller.introduce("draft", model_of(0.0008), 0.0005)
    request = begun(controller, request_kind("draft", "residual", 1.0), draft_ahead=4, leads=leads)
    for _ in range(3):
        request.begin_round(load)
    chosen = controller.choose_rule(["residual", "strict"], "draft", 1.0, load)
    assert chosen == ("strict" if leads else "residual")
    # A draft that nobody has seen may allow longer proposals than those with which the target leads.
    controller.introduce("draft", model_of(0.0014, 1), 0.0005)
    assert controller.choose_rule(["strict", "residual"], "draft", 1.0, load) == "strict"


def test_rounds_that_the_target_leads_take_their_mean_however_unevenly_they_are_read() -> None:
    """A late round's answer is followed at once by the next one's, which waited for it."""
    controller = profiled(0.02)
    request = begun(controller, leads=True)
    for number in range(200):
        request.begin_round(1)
        cost = RoundCost(0, 0.019 if number % 2 else 0.001, 0.01, 1, 1, was_led=True)
        request.end_round(round_result(0, 0, cost))
    assert controller.costs("target", "draft", leads=True).seconds(1, 0) == pytest.approx(0.01, rel=0.1)


def test_rules_learn_what_rounds_cost_from_each_other() -> None:
    controller = profiled(0.0005)
    simulate(begun(controller), 100, 2.0, 1)
    other = begun(controller, request_kind("draft", "block", 1.0))
    assert other.begin_round(1) == 0, (
        "a step of the draft takes two of the target's, as the other rule's rounds say"
    )


def test_a_turn_takes_as_many_rounds_of_each_request_however_many_others_there_are() -> None:
    controller = profiled(0.0005)
    requests = [begun(controller) for _ in range(16)]
    rounds_of_all = [[simulate(each, 1, 1.5, 1, load=16)[0] for each in requests] for _ in range(6000)]
    lengths = [lengths[0] for lengths in rounds_of_all]
    turns = [len(list(rounds)) for is_drafted, rounds in groupby(lengths[200:], bool) if is_drafted]
    assert turns
    assert max(turns) <= TURN_ROUNDS


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
