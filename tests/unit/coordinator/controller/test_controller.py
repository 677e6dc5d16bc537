"""Decisions of the controller, round by round, and how it explains them."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest

from tandem.config.speculative import LoadRange
from tandem.model.replica import ReplicaSnapshot, ReplicaState, Role
from tandem.model.speculation_state import DecidingFigure, SpeculationState
from tandem.model.types import AheadBudget, ModelInfo, SpeculationStats, StepProfile, Weights
from tandem_coordinator import speculation_report as report
from tandem_coordinator.controller import (
    ALONE,
    TRIAL_ROUNDS,
    TRIAL_SHARE,
    LoadDecision,
    RequestController,
    RequestKind,
    SpeculationController,
    Terms,
    request_kind,
)
from tandem_coordinator.stats.rounds import Mode, RoundCost, RoundTimes
from tests.unit.coordinator.cli import samples
from tests.unit.coordinator.ended_rounds import round_ended

KIND = request_kind("draft", "residual", 1.0)
K = 4


def begun(controller: SpeculationController, kind: RequestKind = KIND, **options: Any) -> RequestController:
    return controller.request(Terms(kind, K, **options), "target")


def simulate(
    request: RequestController, rounds: int, draft: float, accepted: int, load: int = 1
) -> list[int]:
    """Return the proposal lengths of rounds with a verification of 10 ms and this relative cost of a proposed token."""
    lengths = []
    for _ in range(rounds):
        proposed = request.begin_round(load).tokens
        lengths.append(proposed)
        drafting = 0.01 * draft * proposed
        tokens = load * (proposed + 1)
        seconds = 0.0101 + drafting
        cost = RoundCost(proposed, seconds, 0.01, load, tokens, drafting, load)
        request.round_ended(round_ended(proposed, min(accepted, proposed), cost))
    return lengths


def test_profiles_decide_before_the_first_round() -> None:
    for step, expected in ((0.0005, K), (0.02, 0)):
        controller = profiled(step)
        request = begun(controller)
        assert request.begin_round(1).tokens == expected
        (decision,) = report.describe_decisions(controller)
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


def test_a_fixed_length_request_keeps_its_length_and_informs_the_others() -> None:
    controller = SpeculationController()
    fixed = begun(controller, policy="fixed")
    assert set(simulate(fixed, 300, 0.5, 0)) == {K}
    (decision,) = report.describe_decisions(controller)
    assert (decision.num_speculative_tokens, decision.best_draft_length) == (K, K)
    assert 0.0 < decision.gain < 1.0
    assert simulate(begun(controller), 20, 0.5, 0).count(0) > 15


BY_LOAD = (LoadRange(1, 4, 4), LoadRange(5, 16, 2), LoadRange(17, 24, 0))


def test_lengths_by_load_hold_whatever_is_measured() -> None:
    controller = profiled(0.02)
    request = begun(controller, policy=BY_LOAD)
    for load, tokens in ((1, 4), (4, 4), (5, 2), (16, 2), (17, 0), (100, 0), (16, 2)):
        assert set(simulate(request, 60, 2.0, 0, load)) == {tokens}
        expected = report.on(tokens) if tokens else report.off(report.NOTHING_AT_THIS_LOAD)
        assert report.decided(request) == expected
    short = controller.request(Terms(KIND, 1, BY_LOAD), "target")
    assert short.begin_round(1).tokens == 1, "a request may ask for fewer"


def test_a_fixed_number_of_outcomes_is_always_drafted_for() -> None:
    controller = SpeculationController()
    request = begun(controller, draft_ahead=8)
    assert request.begin_round(1).ahead_budget == AheadBudget(8, K)
    (decision,) = report.describe_decisions(controller)
    assert decision.reason == f"batch 1: K = {K}, ahead 8, nothing was measured yet"
    fixed = begun(controller, request_kind("draft", "strict", 1.0), draft_ahead=8, policy="fixed")
    for _ in range(100):
        simulate(fixed, 1, 0.05, 0, load=4)
        assert fixed.begin_round(4).ahead_budget == AheadBudget(8, K)


def test_a_draft_that_cannot_pay_is_not_tried_at_once() -> None:
    assert not any(simulate(begun(profiled(0.02)), 100, 2.0, K))


def test_a_mode_that_lost_much_does_not_keep_another_waiting() -> None:
    """Each mode has its own pause. With one for all, what the last trial had lost kept the better mode waiting."""
    request = begun(profiled(0.008), draft_ahead="auto")
    modes: list[Mode] = []
    granted = 0
    for _ in range(1500):
        plan = request.begin_round(1)
        drafting = 0.0 if granted else 0.008 * plan.tokens
        seconds = 0.0101 + (0.004 if granted and plan.tokens else drafting)
        cost = RoundCost(plan.tokens, seconds, 0.01, 1, plan.tokens + 1, drafting, 1)
        modes += [plan.mode] if plan.tokens else []
        request.round_ended(round_ended(plan.tokens, 0, cost, awaited=granted > 0 and plan.tokens > 0))
        granted = plan.outcomes
    turns = [mode for mode, _ in groupby(modes)]
    assert Mode.ASKED in turns
    assert turns.count(Mode.AHEAD) >= turns.count(Mode.ASKED)


def test_a_newer_profile_replaces_what_was_known() -> None:
    controller = profiled(0.0005)
    running = begun(controller)
    assert running.begin_round(1).tokens == K
    controller.introduce("draft", model_of(0.02), 0.0001)
    assert begun(controller).begin_round(1).tokens == K, "the same version: nothing new"
    controller.introduce("draft", model_of(0.02, version=1), 0.0001)
    assert running.begin_round(1).tokens == 0


@pytest.mark.parametrize("leads", [False, True])
def test_a_predicted_gain_is_at_most_what_a_whole_proposal_makes(leads: bool) -> None:
    """Rounds of the target alone that waited for others, under load, do not make drafting pay more than it can."""
    controller = profiled(0.0005)
    request = begun(controller, leads=leads)
    alone = 0
    for _ in range(3000):
        proposed = request.begin_round(4).tokens
        alone += not proposed
        seconds = 0.012 if proposed else 0.03
        cost = RoundCost(proposed, seconds, 0.01, 4, 4 * (proposed + 1), 0.0005 * proposed, 4)
        cost.was_led = leads and not proposed
        request.round_ended(round_ended(proposed, min(proposed, 1), cost))
    assert alone >= TRIAL_ROUNDS, "some rounds tried it"
    (decision,) = report.describe_decisions(controller)
    assert 1.0 < decision.gain <= K + 1, decision.reason
    assert decision.num_speculative_tokens > 0
    assert decision.measured_seconds < 1.5 * decision.predicted_seconds, "of rounds as they were chosen to be"


def test_each_target_has_its_own_costs() -> None:
    controller = SpeculationController()
    slow = controller.request(Terms(KIND, K), "slow")
    fast = controller.request(Terms(KIND, K), "fast")
    simulate(slow, 300, 0.05, 2)
    lengths = simulate(fast, 300, 2.0, 2)
    assert lengths[-40:].count(0) > 35
    assert slow.begin_round(1).tokens > 0
    assert slow.begin_round(1, "fast").tokens == 0, "it has moved there"


@pytest.mark.parametrize("names", [("strict", "block", "residual"), ("residual", "block", "strict")])
def test_auto_chooses_the_rule_with_the_most_tokens_once_each_is_measured(names: tuple[str, ...]) -> None:
    controller = SpeculationController()
    accepted = {"block": 2, "strict": 4, "residual": 1}
    chosen = []
    for _ in range(40):
        name = controller.choose_rule(names, "draft", 1.0, 1)
        chosen.append(name)
        request = begun(controller, request_kind("draft", name, 1.0), policy="fixed")
        simulate(request, 60, 0.05, accepted[name])
    assert set(chosen[10:]) == {"strict"}


@pytest.mark.parametrize(("policy", "few"), [("adaptive", 1), ("fixed", 0)])
def test_after_a_miss_a_slow_draft_is_asked_for_few_tokens_or_none(policy: str, few: int) -> None:
    """Under a fixed policy for all of them, or none."""
    fast = begun(profiled(0.0001), draft_ahead=8, policy=policy)
    slow = begun(profiled(0.0045), draft_ahead=8, policy=policy)
    for request in (fast, slow):
        request.begin_round(1)
    assert fast.tokens_after_miss(K) == K
    assert slow.tokens_after_miss(K) <= few


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
        request.round_ended(round_ended(0, 0, cost))
    assert request.decision is not None
    assert request.decision.seconds[0][0] == pytest.approx(0.01, rel=0.1)


def test_rules_learn_what_rounds_cost_from_each_other() -> None:
    controller = profiled(0.0005)
    simulate(begun(controller), 100, 2.0, 1)
    other = begun(controller, request_kind("draft", "block", 1.0))
    assert other.begin_round(1).tokens == 0, (
        "a step of the draft takes two of the target's, as the other rule's rounds say"
    )


def test_a_trial_takes_as_many_rounds_of_each_request_however_many_others_there_are() -> None:
    controller = profiled(0.0005)
    requests = [begun(controller) for _ in range(16)]
    rounds_of_all = [[simulate(each, 1, 1.5, 1, load=16)[0] for each in requests] for _ in range(6000)]
    lengths = [lengths[0] for lengths in rounds_of_all]
    trials = [len(list(rounds)) for is_drafted, rounds in groupby(lengths[200:], bool) if is_drafted]
    assert trials
    assert max(trials) <= TRIAL_ROUNDS


def test_trials_cost_little_even_where_a_draft_reads_what_it_missed_first() -> None:
    """Such rounds take long, end behind the trial, and say nothing of later ones: they have no cost."""
    request = begun(profiled(0.02))
    seconds = {True: 0.2, False: 0.01}
    spent = {True: 0.0, False: 0.0}
    for _ in range(50_000):
        proposed = request.begin_round(1).tokens
        is_drafted = proposed > 0
        cost = None if is_drafted else RoundCost(0, seconds[False], 0.01, 1, 1)
        times = RoundTimes(0.0, 0.0, 0.0, 0.0, seconds[is_drafted])
        request.round_ended(round_ended(proposed, 0, cost)._replace(times=times))
        spent[is_drafted] += seconds[is_drafted]
    assert spent[True], "it was tried"
    assert spent[True] <= 2.0 * TRIAL_SHARE * spent[False]


@pytest.mark.parametrize("leads", [False, True])
def test_a_target_that_leads_alone_is_interrupted_less_often(leads: bool) -> None:
    """It begins anew before a trial and behind it: two more rounds of each request are slow."""
    assert any(simulate(begun(profiled(0.02), leads=leads), 500, 2.0, K)) is not leads


@pytest.mark.parametrize("load", [1, 16])
def test_predictions_are_seldom_renewed_once_they_rest_on_many_rounds(
    load: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewals: list[int] = []
    renew = LoadDecision.renew

    def counted(decision: LoadDecision) -> None:
        renewals.append(decision.load)
        renew(decision)

    monkeypatch.setattr(LoadDecision, "renew", counted)
    rounds = 200 * load
    simulate(begun(profiled(0.02)), rounds, 2.0, 0, load)
    assert 10 <= len(renewals) <= 45


def test_a_small_gain_is_not_called_a_loss() -> None:
    request = begun(profiled(0.0005))
    request.begin_round(1)
    assert request.decision is not None
    request.decision.plan = ALONE
    off = report.decided(request)
    assert off.reason == report.GAINS_TOO_LITTLE
    with_draft, alone = off.figures
    assert with_draft.value >= alone.value


@pytest.mark.parametrize(("step", "accepted", "tokens"), [(0.0001, K, 2 * K), (0.001, 1, 1), (0.02, 0, 0)])
def test_advice_is_the_best_length_up_to_twice_the_longest(step: float, accepted: int, tokens: int) -> None:
    controller = profiled(step)
    assert report.advise(controller) is None
    simulate(begun(controller, policy="fixed"), 300, step / 0.01, accepted)
    advice = report.advise(controller)
    assert advice is not None
    assert advice.num_speculative_tokens == tokens
    assert advice.gain_then > advice.gain_now


@pytest.mark.parametrize(("step", "words"), [(0.0005, ""), (0.02, "not expected to pay on this machine: 0.")])
def test_where_a_draft_is_too_slow_the_start_says_so(step: float, words: str) -> None:
    decision = profiled(step).predict("target", Terms(KIND, K), 1)
    assert words in report.forecast(decision)
    assert bool(words) is bool(report.forecast(decision))
    unknown = SpeculationController().predict("target", Terms(KIND, K), 1)
    assert report.forecast(unknown) == ""


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
        ([CONNECTING], report.STARTING),  # it may have a head
        ([CONNECTING, TARGET], report.NO_DRAFT),
    ],
)
def test_a_coordinator_without_a_draft_says_so_once_it_knows_a_target(
    replicas: list[ReplicaSnapshot], reason: str
) -> None:
    state = report.of_coordinator(replicas, is_enabled=True, num_speculative_tokens=2, latest=None)
    assert state == report.off(reason)


# ---- weights that change


OTHER_KIND = request_kind("another draft", "residual", 1.0)


def with_weights(seconds: float, fingerprint: str) -> ModelInfo:
    return replace(model_of(seconds), weights=Weights(1, fingerprint))


def informed() -> SpeculationController:
    """A controller that has seen two drafts whose proposals were all rejected, and all weights."""
    controller = SpeculationController()
    for name, seconds in (("target", 0.01), ("draft", 0.001), ("another draft", 0.001)):
        controller.introduce(name, with_weights(seconds, f"of {name}"), 0.0001)
    for kind in (KIND, OTHER_KIND):
        simulate(begun(controller, kind), 200, 0.1, 0)
    return controller


def kinds_decided(controller: SpeculationController) -> set[RequestKind]:
    return {terms.kind for _, terms, _ in controller.decisions}


def first_length(controller: SpeculationController, kind: RequestKind) -> int:
    return begun(controller, kind).begin_round(1).tokens


def test_new_weights_of_a_target_forget_what_was_accepted_of_every_draft() -> None:
    controller = informed()
    assert kinds_decided(controller) == {KIND, OTHER_KIND}
    before = [first_length(controller, kind) for kind in (KIND, OTHER_KIND)]
    controller.introduce("target", with_weights(0.01, "new ones"), 0.0001)
    assert not controller.decisions
    assert [first_length(controller, kind) for kind in (KIND, OTHER_KIND)] == [K, K] != before


def test_new_weights_of_a_draft_forget_what_was_accepted_of_that_draft() -> None:
    controller = informed()
    before = first_length(controller, OTHER_KIND)
    controller.introduce("draft", with_weights(0.001, "new ones"), 0.0001)
    assert kinds_decided(controller) == {OTHER_KIND}
    assert first_length(controller, KIND) == K
    assert first_length(controller, OTHER_KIND) == before != K


def test_weights_that_are_met_again_or_not_told_forget_nothing() -> None:
    controller = informed()
    decided = dict(controller.decisions)
    controller.introduce("target", with_weights(0.01, "of target"), 0.0001)
    controller.introduce("target", model_of(0.01), 0.0001)
    controller.introduce("a second target", with_weights(0.01, "of another service"), 0.0001)
    assert controller.decisions == decided
