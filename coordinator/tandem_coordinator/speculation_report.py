"""The state of speculation: whether it works, and if not, why.

All other modules know only `SpeculationState` and `SpeculationDecision`, which are filled here from the controller's
decisions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tandem.errors import plural
from tandem.model.replica import ReplicaSnapshot, ReplicaState, Role
from tandem.model.speculation_state import DecidingFigure, SpeculationDecision, SpeculationState
from tandem.model.types import SpeculationStats
from tandem_coordinator.controller import ALONE, LoadDecision, RequestController, SpeculationController
from tandem_coordinator.settings.coordinator import MAX_SPECULATIVE_TOKENS
from tandem_coordinator.stats.rounds import Mode

DISABLED = "switched off (tandem admin config set speculation true)"
STARTING = "the coordinator is starting"
NO_DRAFT = "the coordinator has no draft (--draft-address)"
NOT_ASKED = "the request asked for the target alone"
PENALIZED = "a request with penalties leaves the draft model out"
NONE_READY = "no draft takes new sequences (tandem admin replicas list)"
TOO_SHORT = "the completion ended before the draft proposed anything"
PROPOSED_NOTHING = "the draft found nothing to propose"
DOES_NOT_PAY = "drafting does not pay"
GAINS_TOO_LITTLE = "drafting gains too little to be sure"
NOTHING_AT_THIS_LOAD = "speculation_policy proposes nothing at this load"
TOO_LONG = "the text is longer than draft_max_length"
LATE = "the draft does not answer in time"


def off(reason: str, *figures: DecidingFigure) -> SpeculationState:
    """State: the target works alone, for this reason."""
    return SpeculationState(is_on=False, num_speculative_tokens=0, reason=reason, figures=figures)


def on(num_speculative_tokens: int) -> SpeculationState:
    """State: speculation works as configured."""
    return SpeculationState(is_on=True, num_speculative_tokens=num_speculative_tokens)


def decided(request: RequestController) -> SpeculationState:
    """State of speculation as the controller decided it for a request and others like it."""
    decision = request.decision
    if decision is None or (not request.terms.is_adaptive and decision.terms.max_tokens):
        return on(request.terms.max_tokens if decision is None else decision.terms.max_tokens)
    if decision.plan.tokens:
        return on(decision.plan.tokens)
    if not request.terms.is_adaptive:
        return off(NOTHING_AT_THIS_LOAD)
    speed_with = round(decision.predict_speed(decision.compared), 1)
    speed_without = round(decision.predict_speed(ALONE), 1)
    return off(
        DOES_NOT_PAY if speed_with < speed_without else GAINS_TOO_LITTLE,
        DecidingFigure("with", speed_with, "tokens/s"),
        DecidingFigure("without", speed_without, "tokens/s"),
    )


def describe_decisions(controller: SpeculationController) -> Iterator[SpeculationDecision]:
    """Decisions for each target, kind and load seen so far."""
    for (target, _, _), decision in controller.decisions.items():
        yield _describe(target, decision)


@dataclass(frozen=True, slots=True)
class Advice:
    """A longest proposal with which requests would be faster than now, as the controller predicts."""

    num_speculative_tokens: int
    """0: the target alone."""
    load: int
    """Sequences that share the target."""
    gain_now: float
    """Predicted tokens per second of present rounds, over those of the target alone."""
    gain_then: float


def advise(controller: SpeculationController) -> Advice | None:
    """The controller's prediction for the load at which most of the time was spent; None while nothing was measured."""
    seen = [decision for decision in controller.decisions.values() if decision.measured_seconds]
    if not seen:
        return None
    decision = max(seen, key=lambda decision: decision.measured_seconds)
    most = min(2 * max(decision.terms.max_tokens, 1), MAX_SPECULATIVE_TOKENS)
    terms = decision.terms._replace(max_tokens=most, policy="adaptive")
    free = LoadDecision(decision.costs, decision.gains, terms, decision.load)
    alone = free.predict_speed(ALONE)
    best = max(free.best.values(), key=free.predict_speed)
    return Advice(
        best.tokens,
        decision.load,
        gain_now=decision.predict_speed(decision.plan) / alone,
        gain_then=free.predict_speed(best) / alone,
    )


def _describe(target: str, decision: LoadDecision) -> SpeculationDecision:
    load = decision.load
    terms = decision.terms
    steps = decision.steps
    compared = decision.compared
    asked_ratio = decision.costs.ratio(Mode.ASKED, load)
    alone_ratio = decision.costs.ratio(Mode.ALONE, load)
    is_known = decision.is_known
    return SpeculationDecision(
        target=target,
        draft=terms.kind.draft,
        rule=terms.kind.rule,
        temperatures=terms.kind.temperatures,
        load=load,
        num_speculative_tokens=decision.plan.tokens,
        best_draft_length=compared.tokens if is_known else 0,
        gain=decision.gain,
        predicted_seconds=decision.predicted_seconds,
        measured_seconds=decision.measured_seconds,
        round_seconds=tuple(decision.seconds[compared.outcomes]) if is_known else (),
        acceptance_rates=tuple(decision.gains.acceptance.rates(terms.max_tokens)) if is_known else (),
        draft_step_seconds=asked_ratio * steps.draft,
        message_seconds=asked_ratio * (steps.target_question + steps.draft_question),
        ahead_outcomes=decision.plan.outcomes,
        alone_message_seconds=0.0 if steps.leads else alone_ratio * steps.target_question,
    )


def forecast(decision: LoadDecision) -> str:
    """A sentence where drafting is predicted not to pay before any round was measured; empty otherwise."""
    if decision.plan.tokens or not decision.costs.is_profiled:
        return ""
    return (
        f"drafting is not expected to pay on this machine: {decision.gain:.2f} times the speed of the target alone, "
        f"with {plural(decision.compared.tokens, 'token')} proposed; few rounds will draft, to see whether it does"
    )


def late(late_seconds: float, patience_seconds: float) -> SpeculationState:
    """State: a draft answers too late."""
    return off(
        LATE,
        DecidingFigure("late by", round(late_seconds * 1000), "ms"),
        DecidingFigure("patience", round(patience_seconds * 1000), "ms"),
    )


def at_the_end(state: SpeculationState, stats: SpeculationStats) -> SpeculationState:
    """The state of a request that has ended without a single proposed token, or as it was.

    One round is too short for a draft. After more rounds, drafting without a model found no match in the text.
    """
    if state.is_on and stats.drafted == 0:
        return replace(state, reason=TOO_SHORT if stats.rounds <= 1 else PROPOSED_NOTHING)
    return state


def of_coordinator(
    replicas: Sequence[ReplicaSnapshot],
    *,
    is_enabled: bool,
    num_speculative_tokens: int,
    latest: SpeculationState | None,
) -> SpeculationState:
    """State of speculation that a new request can expect.

    Args:
        latest: State of the oldest running request or of the last one; None before any.
    """
    drafts = [replica for replica in replicas if replica.role is Role.DRAFT]
    if not drafts:
        drafts = [replica for replica in replicas if replica.model and replica.model.drafting_method]
    if not drafts:
        # A target that was never reached may have a head of its own.
        is_known = any(replica.state is not ReplicaState.CONNECTING for replica in replicas)
        return off(NO_DRAFT if is_known else STARTING)
    if not is_enabled:
        return off(DISABLED)
    if not any(draft.state is ReplicaState.READY for draft in drafts):
        return off(NONE_READY)
    return latest or on(num_speculative_tokens)
