"""The number of tokens that each round proposes, and how far the draft works ahead. Pure: no clock and no I/O.

A round is made in one of three modes: by the target alone, by asking the draft (or a head of the target's own), or with
what the draft has drafted ahead. The controller plans the round with the most expected tokens per second at its load:

    expected tokens(K) / (predicted seconds(mode, K, load) x measured ratio(mode, load))

TurboSpec (Liu et al. 2024, arXiv 2406.14066) calls this goodput. The prediction comes from the step profiles that the
services measure when they have warmed up, and the ratio is that of measured to predicted seconds. Modes that are not
chosen are tried now and then: what is known of them is a prediction, or old.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from tandem.acceptance.strategies import GREEDY, STRICT
from tandem.config.speculative import SpeculationPolicy
from tandem.model.types import AheadBudget, ModelInfo
from tandem_coordinator.outcomes import Coming
from tandem_coordinator.prediction import (
    OUTCOMES,
    CostModel,
    GainModel,
    ServiceSpeed,
    StepSeconds,
    expected_tokens,
)
from tandem_coordinator.stats.rounds import Mode, RoundCost, RoundEnded, RoundPlan

HYSTERESIS = 1.03
"""Factor in predicted tokens per second by which another plan must be better: the standard error of a rate."""
OPTIMISM = 0.5
"""Standard deviations by which the acceptance may be better than known, in the decision between drafting and not. In
simulations 1 loses 1 % of the first 100 rounds."""
RULE_OPTIMISM = 2.0
"""The same in the choice of a rule, so that each is tried."""
TRIAL_ROUNDS = 4
"""Rounds of each request in a trial. The first is a cold one: the target is asked for what it would begin by itself, or
the draft reads what was committed since it last proposed."""
TRIAL_SHARE = 0.005
"""Share of the rounds that the trials of a mode may lose."""
COLD_ROUNDS = 2
"""Further rounds of each request that are as slow as a trial's, where the target led alone: it begins anew before the
trial and behind it."""
SETTLING_ROUNDS = 8
"""Predictions are renewed when an eighth more rounds are counted, at the latest after eight of each request: one takes
as long as all else that the controller does in twenty rounds, and medians over 32 rounds change slowly."""
WAKINGS = 2.0
"""Health checks that a question takes as long as: it wakes the engine's thread, and the event loop for its answer."""


# ---- requests, and what is planned for their rounds

DraftAhead: TypeAlias = Literal["auto", "off"] | int
"""auto: as far as it pays; off: not at all; a number: always for so many outcomes."""

TEMPERATURE_RANGES = (0.0, 0.3, 0.6, 0.85, 1.15)
"""Upper ends of the temperature ranges that share acceptance counts; the last range is open."""


class RequestKind(NamedTuple):
    """Requests that share acceptance counts."""

    draft: str
    """Name of the draft's model."""
    rule: str
    """Name of the acceptance rule."""
    temperatures: str
    """Range of temperatures in words, for instance "0.85-1.15"."""


def request_kind(draft: str, rule: str, temperature: float) -> RequestKind:
    """The kind of a request."""
    lower = 0.0
    for upper in TEMPERATURE_RANGES:
        if temperature <= upper:
            return RequestKind(draft, rule, f"{lower:g}-{upper:g}" if upper else "0")
        lower = upper
    return RequestKind(draft, rule, f"above {lower:g}")


class Terms(NamedTuple):
    """The traits that requests with one decision share."""

    kind: RequestKind
    max_tokens: int
    """Tokens of the longest proposal."""
    policy: SpeculationPolicy = "adaptive"
    """How much rounds propose."""
    draft_ahead: DraftAhead = "off"
    leads: bool = False
    """True if the target, left alone, begins the next rounds before it is asked."""
    has_head: bool = False
    """True if the target's own head proposes: nobody is asked for a proposal, and it leads with proposals as alone."""

    @property
    def is_adaptive(self) -> bool:
        """True if measurements change how much is proposed."""
        return self.policy == "adaptive"

    def at(self, load: int) -> Terms:
        """The terms at a load: where the policy has lengths by load, the length there is a fixed one."""
        if isinstance(self.policy, str):
            return self
        near = next((each for each in self.policy if load <= each.last), self.policy[-1])
        return self._replace(max_tokens=min(near.tokens, self.max_tokens), policy="fixed")

    @property
    def leads_proposals(self) -> bool:
        """True if the target leads with proposals, too: where tokens alone decide."""
        return self.leads and self.kind.rule in (GREEDY.name, STRICT.name)

    @property
    def outcomes(self) -> tuple[int, ...]:
        """The numbers of outcomes that rounds may draft ahead for; 0: not ahead."""
        match self.draft_ahead:
            case "auto":
                return (0, *OUTCOMES)
            case "off":
                return (0,)
            case count:
                return (count,)

    @property
    def max_budget(self) -> AheadBudget | None:
        """The most that any round will grant; None for nothing."""
        return RoundPlan(self.max_tokens, self.outcomes[-1]).ahead_budget


ALONE = RoundPlan(0)


# ---- decisions


@lru_cache(1024)
def load_class(load: int) -> int:
    """Loads of one class share a decision: each up to 8 has its own, then there are four for each doubling."""
    return load if load < 9 else 9 + int(4.0 * math.log2(load / 9.0))


class LoadDecision:
    """The plan for requests on the same terms at one load, and the trial of another one."""

    def __init__(self, costs: CostModel, gains: GainModel, terms: Terms, load: int) -> None:
        self.costs = costs
        self.gains = gains
        self.terms = terms
        self.load = load
        self.plan = RoundPlan(terms.max_tokens, terms.outcomes[0])
        self.expected: list[float] = []
        """Expected tokens of a round, by proposed tokens."""
        self.seconds: dict[int, list[float]] = {}
        """Predicted seconds of a round, by outcomes that it drafts ahead for and by proposed tokens."""
        self.steps = self._predict_steps()
        self.predicted_seconds = 0.0
        """Of all rounds in the mode that was chosen."""
        self.measured_seconds = 0.0
        self.best: dict[Mode, RoundPlan] = {}
        """The best plan of each mode."""
        self.gain = 0.0
        """Predicted tokens per second with proposals, over those of the target alone; 0: unknown."""
        self._ratios: dict[Mode, float] = {}
        """Measured by predicted seconds, when last renewed."""
        self._asked = self.steps.predict_asked()
        """Predicted seconds of a round that does not draft ahead, by proposed tokens, before the ratio."""
        self._rounds = 0
        self._renew_at = 0
        self._trial: RoundPlan | None = None
        self._trial_ends_at = 0
        self._tried: Mode | None = None
        """The mode of the last trial, until it is chosen."""
        self._tried_at: dict[Mode, int] = {}
        """Round in which each mode was last tried or left."""
        self._lost: dict[Mode, float] = {}
        """Rounds in whose time the last trial of each mode would have made what it lost."""
        self.renew()

    def predict_speed(self, plan: RoundPlan, expected: Sequence[float] = ()) -> float:
        """Tokens per second of each request, with the acceptance that is known or with another one."""
        return (expected or self.expected)[plan.tokens] / self.seconds[plan.outcomes][plan.tokens]

    @property
    def is_known(self) -> bool:
        """True if predictions are in seconds."""
        return self.costs.is_known

    @property
    def compared(self) -> RoundPlan:
        """The plan with proposals that the target alone is compared with: the chosen one, else the best."""
        drafting = [plan for plan in (self.plan, *self.best.values()) if plan.tokens]
        return self.plan if self.plan.tokens else max(drafting, key=self.predict_speed, default=ALONE)

    def predict_best(self, deviations: float) -> float:
        """Tokens per second of the best plan, with an acceptance that is so many standard deviations better."""
        expected = expected_tokens(self.gains.acceptance.rates(self.terms.max_tokens, deviations))
        return max(self.predict_speed(plan, expected) for plan in self._find_best(expected).values())

    def renew(self) -> None:
        """Predict again, and change to another plan that is clearly better."""
        acceptance = self.gains.acceptance
        hoped = expected_tokens(acceptance.rates(self.terms.max_tokens, OPTIMISM))
        self.expected = expected_tokens(acceptance.rates(self.terms.max_tokens))
        self._predict_seconds()
        is_first = not self.best
        mode = self.plan.mode
        self.best = self._find_best(hoped)
        best = max(self.best.values(), key=lambda plan: self.predict_speed(plan, hoped))
        if is_first or self.predict_speed(best, hoped) > HYSTERESIS * self.predict_speed(self.plan, hoped):
            self.plan = best
        if is_first or self.plan.mode is not mode:
            self._tried_at = dict.fromkeys(Mode, self._rounds)
            self._lost = {}
            self._tried = None
        if self.is_known:
            self.gain = self.predict_speed(self.compared) / self.predict_speed(ALONE)
        settled = min(self._rounds // SETTLING_ROUNDS, SETTLING_ROUNDS * self.load)
        self._renew_at = self._rounds + max(self.load, TRIAL_ROUNDS, settled)

    def _predict_steps(self) -> StepSeconds:
        terms = self.terms
        steps = self.costs.predict_steps(self.load, terms.max_tokens)
        return replace(
            steps, leads=terms.leads, leads_proposals=terms.leads_proposals, has_head=terms.has_head
        )

    def _predict_seconds(self) -> None:
        costs = self.costs
        load = self.load
        self._ratios = {mode: costs.ratio(mode, load) for mode in Mode}
        alone, asked, ahead = self._ratios.values()
        self.steps = self._predict_steps()
        self._asked = self.steps.predict_asked()
        seconds = [alone * self._asked[0], *(asked * each for each in self._asked[1:])]
        self.seconds = {0: seconds}
        for outcomes in self.terms.outcomes:
            if not outcomes:
                continue
            hit_rate = self.gains.hit_rate(outcomes)
            hits = self.steps.predict_hits(costs.predict_branch_step(load, outcomes))
            self.seconds[outcomes] = [
                ahead * (hit_rate * hit + (1.0 - hit_rate) * miss)
                for hit, miss in zip(hits, self._asked, strict=True)
            ]
            self.seconds[outcomes][0] = seconds[0]

    def _find_best(self, expected: Sequence[float]) -> dict[Mode, RoundPlan]:
        """The plan of each mode with the most tokens per second."""
        lengths = range(self.terms.max_tokens + 1) if self.terms.is_adaptive else (self.terms.max_tokens,)
        drafted = [tokens for tokens in lengths if tokens]
        best = {Mode.ALONE: ALONE} if 0 in lengths else {}
        for outcomes in self.terms.outcomes if drafted else ():
            speeds = [made / taken for made, taken in zip(expected, self.seconds[outcomes], strict=True)]
            plan = RoundPlan(max(drafted, key=speeds.__getitem__), outcomes)
            other = best.setdefault(plan.mode, plan)
            if speeds[plan.tokens] > self.predict_speed(other, expected):
                best[plan.mode] = plan
        return best

    def begin_round(self) -> RoundPlan:
        """The plan of the round that begins."""
        self._rounds += 1
        if self._trial is not None and self._rounds >= self._trial_ends_at:
            self._trial = None
            self._renew_at = 0
        if self._trial is None and self._rounds >= self._renew_at:
            self.renew()
            self._begin_due_trial()
        return self._trial or self.plan

    def _begin_due_trial(self) -> None:
        """Try another mode, as seldom as keeps what its trials lose at `TRIAL_SHARE`.

        All requests take part: one that drafts beside others takes what it never takes otherwise.
        """
        rounds = TRIAL_ROUNDS * self.load
        present = self.plan.mode
        is_led_alone = self.terms.leads and present is Mode.ALONE
        cold = COLD_ROUNDS * self.load if is_led_alone else 0
        for mode, plan in self.best.items():
            if mode is present:
                continue
            slower = 0.0
            if self.costs.is_known_of(mode):
                slower = 1.0 - self.predict_speed(plan) / self.predict_speed(self.plan)
            predicted = (rounds + cold) * max(slower, HYSTERESIS - 1.0)
            lost = max(predicted, self._lost.get(mode, 0.0))
            if self._rounds < self._tried_at[mode] + lost / TRIAL_SHARE:
                continue
            self._trial = plan
            self._tried = mode
            self._trial_ends_at = self._rounds + rounds
            self._tried_at[mode] = self._rounds
            self._lost[mode] = 0.0
            return

    def end_round(self, result: RoundEnded, planned: RoundPlan, granted: int, seconds: float) -> None:
        """Count a round that has ended.

        Args:
            granted: Outcomes of the round before that the draft was to work ahead for.
            seconds: That it took.
        """
        if result.proposed:
            self.gains.acceptance.add(result.proposed, result.accepted)
        # A draft that was to work ahead and did not has missed, too.
        is_ahead = granted > 0 and planned.tokens > 0 and (result.awaited_outcome or result.proposed > 0)
        if is_ahead:
            self.gains.add_outcome(result.outcome_rank, granted)
            if result.outcome_step is not None:
                step = result.outcome_step
                self.costs.add_branch_step(step.sequences, granted, step.seconds)
        # Rounds of a trial end when it is over, too, and the first ones wait for a draft that reads what it missed.
        if planned.mode is self._tried and not result.has_read:
            made = result.times.seconds * self.predict_speed(self.plan)
            lost = (made - result.committed) / self.expected[self.plan.tokens]
            self._lost[planned.mode] = self._lost.get(planned.mode, 0.0) + lost
        if result.cost is None or result.proposed >= len(self._asked):
            return
        if is_ahead:
            self._count_seconds(
                result.cost, Mode.AHEAD, planned.tokens, seconds, self._predict_ended(result, granted)
            )
        elif (result.proposed > 0) == (planned.tokens > 0):  # else it found nothing, or reads what it missed
            mode = Mode.ASKED if result.proposed else Mode.ALONE
            self._count_seconds(result.cost, mode, result.proposed, seconds, self._asked[result.proposed])

    def _predict_ended(self, result: RoundEnded, granted: int) -> float:
        """Seconds of a round whose hit or miss is known."""
        if result.outcome_rank is None:
            return self._asked[result.proposed]
        step = result.outcome_step
        branch_step = self.costs.predict_branch_step(self.load, granted) if step is None else step.seconds
        return self.steps.predict_hits(branch_step)[result.proposed]

    def _count_seconds(
        self, cost: RoundCost, mode: Mode, tokens: int, seconds: float, predicted: float
    ) -> None:
        if not cost.is_typical(self.load, tokens):
            return
        self.costs.add_round(mode, self.load, seconds, predicted)
        if mode is self.plan.mode:
            self.predicted_seconds += predicted * self._ratios[mode]
            self.measured_seconds += seconds

    def choose_after_miss(self, count: int) -> int:
        """Number of tokens to ask for, `count` at most, where another outcome came than was drafted for."""
        speed = self.predict_speed(self.plan) * self._ratios[Mode.AHEAD]
        lengths = range(count + 1) if self.terms.is_adaptive else (0, count)
        return max(lengths, key=lambda tokens: self.expected[tokens] - speed * self._asked[tokens])


def tokens_after_hit(expected: Sequence[float], coming: Coming, *, tokens_per_second: float) -> int:
    """Number of tokens to wait for when the draft is still drafting the continuation of the outcome that came.

    `expected` has as many tokens as the round may have, `tokens_per_second` is what rounds make now.
    """

    def predict_worth(count: int) -> float:
        return expected[count] - tokens_per_second * coming.seconds(count)

    return max(range(coming.ready, len(expected)), key=predict_worth, default=coming.ready)


class RequestController:
    """One request's part: `begin_round` plans a round, `end_round` counts its result."""

    def __init__(self, controller: SpeculationController, terms: Terms, target: str) -> None:
        self.terms = terms
        self.load = 1
        """Sequences that share the target in the round in progress."""
        self.plan = ALONE
        """Of the round in progress."""
        self.decision: LoadDecision | None = None
        """The decision that it follows; None before the first round."""
        self._controller = controller
        self._target = target
        self._profiles = 0
        """Profiles that the decision knows of."""
        self._granted = 0
        """Outcomes of the round before that the draft was to work ahead for."""
        self._led_seconds: float | None = None
        """Of the round before, if the target began it itself."""

    def begin_round(self, load: int, target: str | None = None) -> RoundPlan:
        """Plan the round that begins.

        Args:
            load: Sequences that share the target.
            target: Its address; None: as before.
        """
        target = target or self._target
        known = self.load, self._target, self._profiles
        if self.decision is None or known != (load, target, self._controller.profiles):
            self.load = load
            self._target = target
            self._profiles = self._controller.profiles
            self.decision = self._controller.decide(target, self.terms.at(load), load)
        self._granted = self.plan.outcomes
        plan = self.decision.begin_round()
        self.plan = plan._replace(load=load, predicted_gain=self.decision.gain)
        return self.plan

    def round_ended(self, result: RoundEnded) -> None:
        """Count the round that has ended."""
        if self.decision is not None:
            seconds = 0.0 if result.cost is None else self._even_out(result.cost)
            self.decision.end_round(result, self.plan, self._granted, seconds)

    def _even_out(self, cost: RoundCost) -> float:
        """Seconds of a round. The target may have the answer of one that it began itself before the last one is read:
        then both count as their mean."""
        before = self._led_seconds
        self._led_seconds = cost.seconds if cost.was_led else None
        return cost.seconds if before is None or not cost.was_led else (before + cost.seconds) / 2.0

    def tokens_after_hit(self, coming: Coming, count: int) -> int:
        """Number of tokens of a continuation to wait for, `count` at most, where the draft is still drafting it."""
        decision = self.decision
        most = min(count, coming.max_tokens)
        if decision is None or not decision.is_known or len(decision.expected) <= most:
            return coming.ready
        speed = decision.predict_speed(decision.plan)
        return tokens_after_hit(decision.expected[: most + 1], coming, tokens_per_second=speed)

    def tokens_after_miss(self, count: int) -> int:
        """Number of tokens to ask for, up to `count`, where another outcome came than was drafted for.

        0: the target goes on alone, and the draft works ahead of that. With a fixed policy it is that or `count`.
        """
        decision = self.decision
        if decision is None or not decision.is_known or len(decision.expected) <= count:
            return count
        return decision.choose_after_miss(count)


class SpeculationController:
    """Shared by all requests: costs by target and draft, gains by kind of request, one decision by load."""

    def __init__(self) -> None:
        self.decisions: dict[tuple[str, Terms, int], LoadDecision] = {}
        """By target, terms and load class."""
        self.profiles = 0
        """Profiles that services have reported."""
        self._services: defaultdict[str, ServiceSpeed] = defaultdict(ServiceSpeed)
        """By address of a target or name of a draft."""
        self._costs: dict[tuple[str, str], CostModel] = {}
        """By target and draft."""
        self._gains: defaultdict[RequestKind, GainModel] = defaultdict(GainModel)
        self._fingerprints: dict[str, str] = {}
        """Of the weights of each service, by its name; see `introduce`."""

    def request(self, terms: Terms, target: str = "") -> RequestController:
        """The part of a request that begins, on the target that it is likely to get."""
        return RequestController(self, terms, target)

    def introduce(self, service_name: str, model: ModelInfo | None, round_trip_seconds: float | None) -> None:
        """Tell what a service reports of itself, before a request that uses it. A newer profile starts its costs anew.

        Args:
            service_name: Address of a target, or name of a draft's model.
            model: What it serves, with the profile of its steps.
            round_trip_seconds: Of its health checks.
        """
        if model is None:
            return
        if model.weights is not None:
            self._meet_weights(service_name, model.weights.fingerprint)
        service = self._services[service_name]
        service.question = WAKINGS * (round_trip_seconds or 0.0)
        profile = model.step_profile
        if profile.version <= service.version:
            return
        service.renew(profile)
        self.profiles += 1
        for pair in [pair for pair in self._costs if service_name in pair]:
            del self._costs[pair]
        for key in [key for key in self.decisions if service_name in (key[0], key[1].kind.draft)]:
            del self.decisions[key]

    def _meet_weights(self, service_name: str, fingerprint: str) -> None:
        """Forget what was accepted with other weights of the service."""
        known = self._fingerprints.get(service_name)
        self._fingerprints[service_name] = fingerprint
        if known in (None, fingerprint):
            return
        drafts = {kind.draft for kind in self._gains}
        kinds = [kind for kind in self._gains if service_name not in drafts or kind.draft == service_name]
        for kind in kinds:
            del self._gains[kind]
        for key in [key for key in self.decisions if key[1].kind in kinds]:
            del self.decisions[key]

    def decide(self, target: str, terms: Terms, load: int) -> LoadDecision:
        """The decision for requests on these terms at a load."""
        key = target, terms, load_class(load)
        if key not in self.decisions:
            self.decisions[key] = self.predict(target, terms, load)
        return self.decisions[key]

    def predict(self, target: str, terms: Terms, load: int) -> LoadDecision:
        """A decision as it would be made, which no request follows."""
        pair = target, terms.kind.draft
        if pair not in self._costs:
            self._costs[pair] = CostModel(self._services[target], self._services[terms.kind.draft])
        return LoadDecision(self._costs[pair], self._gains[terms.kind], terms, load)

    def choose_rule(self, names: Sequence[str], draft: str, temperature: float, load: int) -> str:
        """The rule with the most predicted tokens per second, at the nearest load so far."""
        seen = [key for key in self.decisions if key[1].kind.draft == draft]
        if not seen:
            return names[0]
        target, terms, near = min(seen, key=lambda key: abs(key[2] - load_class(load)))

        def predict_speed(name: str) -> float:
            kind = request_kind(draft, name, temperature)
            decision = self.predict(
                target, terms._replace(kind=kind), self.decisions[target, terms, near].load
            )
            return decision.predict_best(RULE_OPTIMISM)

        return max(names, key=predict_speed)
