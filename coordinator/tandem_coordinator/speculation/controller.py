"""How many tokens each round proposes, and how far the draft works ahead. Pure: no clock and no I/O.

The K of a round, possibly 0, is the one with the highest expected tokens per second at the current load:

    argmax over K of (1 + E[accepted(K)]) / seconds(load, K)

TurboSpec (Liu et al. 2024, arXiv 2406.14066) calls this goodput; vLLM's dynamic speculation chooses K by it. The
costs are known before the first round (`costs`). The acceptance is learnt from every proposal (`gains`), and taken
for what it may be at best while few were verified, so that drafting begins, and goes on until it is known not to pay.
Now and then some rounds go as they were not chosen to, because what is known of those is a prediction, or old.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tandem.acceptance.strategies import GREEDY, STRICT
from tandem.model.speculation_state import SpeculationDecision
from tandem.model.types import MAX_AHEAD_TOKENS, AheadBudget, ModelInfo, StepCost
from tandem_coordinator.speculation.ahead import (
    DraftAhead,
    Unfinished,
    best_count,
    outcome_choices,
    tokens_after_hit,
)
from tandem_coordinator.speculation.costs import CostModel, ServiceCosts, Way, load_class
from tandem_coordinator.speculation.gains import (
    FIRST_RATE,
    MEMORY,
    WINDOW,
    GainModel,
    RequestAcceptance,
    RequestKind,
    expected_tokens,
    request_kind,
    temperature_words,
)
from tandem_coordinator.stats.rounds import RoundResult

HYSTERESIS = 1.0 + 0.5 / math.sqrt(MEMORY)
"""Factor in predicted tokens per second by which another choice must be better: the standard error of a rate of 0.5."""
OPTIMISM = 0.5
"""Standard deviations by which the acceptance may be better than known, in the decision between drafting and not. In
simulations 1 loses 1 % of the first 100 rounds, and 1.5 3 %."""
TURN_SHARE = 0.003
"""Share of the rounds that is lost by those that try what was not chosen: the target alone, drafting, or drafting
ahead, each by itself. In simulations 0.005 makes as much, and 0.01 half a percent less."""
TURN_ROUNDS = 4
"""Rounds of one request in such a turn: the target alone is asked for the first, and settles after the second; a draft
reads in the first what was committed since the last turn. As many pass between two decisions of one request."""

_DECIDED_BY_TOKENS = (GREEDY.name, STRICT.name)
"""Rules by which a target that leads can decide rounds with a proposal."""


class Plan(NamedTuple):
    """Proposed tokens, and outcomes that the draft works ahead for."""

    tokens: int
    outcomes: int = 0

    @property
    def way(self) -> Way:
        """The way of working."""
        return Way.ASKED if not self.tokens else Way.AHEAD if self.outcomes else Way.DRAFTED


ALONE = Plan(0)


class Terms(NamedTuple):
    """The traits that requests with one decision share."""

    kind: RequestKind
    max_tokens: int
    """Tokens of the longest proposal."""
    is_adaptive: bool = True
    """False under a fixed policy: measurements do not change how much is proposed."""
    draft_ahead: DraftAhead = "off"
    leads: bool = False
    """True if the target, left alone, begins the next rounds before it is asked."""


class Choice:
    """The decision for one kind of request at one load."""

    def __init__(self, costs: CostModel, gains: GainModel, terms: Terms, load: int) -> None:
        self.costs = costs
        self.gains = gains
        self.load = load
        self.max_tokens = terms.max_tokens
        self._lengths = range(self.max_tokens + 1) if terms.is_adaptive else (self.max_tokens,)
        self._outcomes = outcome_choices(terms.draft_ahead)
        self._leads = terms.leads and terms.kind.rule in _DECIDED_BY_TOKENS
        """True if the target begins rounds whose proposals are drafted ahead."""
        self.plan = self.compared = Plan(self.max_tokens, self._outcomes[0])
        """How rounds are, and the best way to draft, with which the target alone is compared."""
        self.rates: list[float] = []
        """Conditional acceptance by position."""
        self.expected: list[float] = []
        """Expected tokens of a round, by proposed tokens; empty before anything is known."""
        self._seconds: dict[int, list[float]] = {}
        """Predicted seconds of a round by outcomes that are drafted ahead for, and by proposed tokens."""
        self._best: dict[Way, Plan] = {}
        """The best plan of each way of working."""
        self.predicted_seconds = self.measured_seconds = 0.0
        """Of recent rounds that went as they were chosen to."""
        self.requests: dict[RequestSpeculation, None] = {}
        """Those that it decides for now."""
        self._rounds = 0
        self._renew_in = 0
        may_go_alone = terms.is_adaptive and self._outcomes[-1] > 0
        self._can_watch = may_go_alone and terms.kind.rule in _DECIDED_BY_TOKENS
        """True if the target may go on alone beside the draft, and tokens alone tell which would be accepted."""
        self.watches = False
        """True if the draft is asked beside the target alone, and what it proposes compared with what comes."""
        self._turn: Plan | None = None
        """The plan that is tried."""
        self._turn_rounds = 0
        """Rounds that it still needs."""
        self._next_turn, self._next_at = ALONE, 0
        """The plan that is tried next, and the round from which on it is due."""
        self._lost: dict[Way, float] = {}
        """Rounds in whose time the last turn of each way of working would have made what it lost."""
        self._tried: dict[Way, int] = {}
        """Round in which each way of working was last tried, or ceased to be the chosen one."""

    @property
    def seconds(self) -> list[float]:
        """Predicted seconds of a round, by proposed tokens."""
        return self._seconds.get(self.compared.outcomes, [])

    @property
    def tokens_per_second(self) -> list[float]:
        """Predicted tokens per second of each request, by proposed tokens; empty before anything is known."""
        return [made / seconds for made, seconds in zip(self.expected, self.seconds, strict=True)]

    @property
    def gain(self) -> float:
        """Predicted tokens per second with `compared`, over those of the target alone; 0: unknown."""
        return self._speed(self.compared) / self._speed(ALONE) if self.expected else 0.0

    @property
    def _may_pay(self) -> bool:
        """True if drafting would pay with an acceptance as good as the proposals so far leave possible."""
        return self._pays(6.0 * OPTIMISM)

    def _pays(self, deviations: float) -> bool:
        """True if one of the plans that are best now would, with an acceptance so many standard deviations better. With
        all lengths, simulations lose 1 % of the first rounds of 16 requests."""
        expected = expected_tokens(self.gains.acceptance.rates(self.max_tokens, deviations))
        best = max(self._speed(plan, expected) for plan in self._best.values())
        return best > HYSTERESIS * self._speed(ALONE)

    def _speed(self, plan: Plan, expected: Sequence[float] = ()) -> float:
        return (expected or self.expected)[plan.tokens] / self._seconds[plan.outcomes][plan.tokens]

    def begin_round(self) -> Plan:
        """The plan of the round that begins."""
        self._rounds += 1
        self._renew_in -= 1
        if self._turn is not None:
            self._turn_rounds -= 1
            if self._turn_rounds <= 0:
                self._turn, self._renew_in = None, 0
        if self._renew_in <= 0:
            self.renew()
        if self._turn is None and len(self._best) > 1 and self._rounds >= self._next_at:
            # All take part: one that drafts beside others takes what it never takes otherwise.
            self._turn, self._turn_rounds = self._next_turn, TURN_ROUNDS * len(self.requests)
            self._tried[self._turn.way], self._lost[self._turn.way] = self._rounds, 0.0
            self._plan_turn()
        return self.plan if self._turn is None else self._turn

    def watched_tokens(self, request: RequestSpeculation) -> int:
        """Tokens to ask the draft for that are only compared with what comes; 0 for no question."""
        is_one = self.all_watch or next(iter(self.requests)) is request
        return self.compared.tokens if self.watches and is_one else 0

    @property
    def all_watch(self) -> bool:
        """True if all requests watch: on a shared machine 16 that do take half of the target's speed, so that later
        only the first one does."""
        return self.watches and self.gains.acceptance.count < WINDOW

    def spend(self, result: RoundResult, seconds: float) -> None:
        """Count a round towards what the turn in progress loses, if there is one."""
        if self._turn is not None:
            lost = seconds * self._speed(self.plan) - result.committed
            before = self._lost.get(self._turn.way, 0.0)
            self._lost[self._turn.way] = before + lost / self.expected[self.plan.tokens]

    def count(self, way: Way, proposed: int, seconds: float) -> None:
        """Count a uniform round at this load."""
        if way is self.plan.way and proposed < len(self.seconds):
            keep = 1.0 - 1.0 / MEMORY
            self.predicted_seconds = keep * self.predicted_seconds + self.seconds[proposed]
            self.measured_seconds = keep * self.measured_seconds + seconds

    def _plan_turn(self) -> None:
        """Decide what the next turn tries, and when: after as many rounds as keep what it loses at its share."""

        def due(plan: Plan) -> float:
            lost = max(1.0 - self._speed(plan) / self._speed(self.plan), HYSTERESIS - 1.0)
            lost = max(TURN_ROUNDS * len(self.requests) * lost, self._lost.get(plan.way, 0.0))
            return self._tried.get(plan.way, 0) + lost / TURN_SHARE

        others = [plan for plan in self._best.values() if plan.way is not self.plan.way]
        self._next_turn = min(others, key=due, default=ALONE)
        self._next_at = int(due(self._next_turn))

    def renew(self) -> None:
        """Predict again, and change what another choice is clearly better than."""
        costs, load = self.costs, self.load
        if not costs.is_known:
            return
        is_first = not self.expected
        self.rates = self.gains.acceptance.rates(self.max_tokens)
        self.expected = expected_tokens(self.rates)
        self._seconds = {0: [costs.seconds(load, count) for count in range(self.max_tokens + 1)]}
        if ahead := [count for count in self._outcomes if count]:
            at_k = self.expected[: (self.compared.tokens or self.max_tokens) + 1]
            outcomes = min(ahead, key=lambda count: self._ahead_seconds(at_k, count))
            rest = costs.rest_seconds(Way.AHEAD, load)
            # Many requests wait for each other's questions: until it is measured, half of what it saves is believed. Of
            # 16, drafting ahead is predicted 1.7 to 2.2 times as fast as it is (docs/measurements.md).
            doubt = 0.5 if load > 1 and not costs.is_measured(Way.AHEAD) else 0.0
            self._seconds[outcomes] = self._seconds[0][:1] + [
                max(
                    self._ahead_seconds(self.expected[: tokens + 1], outcomes) + rest * self.expected[tokens],
                    costs.verify_seconds(load, tokens),
                )
                * (1.0 - doubt)
                + self._seconds[0][tokens] * doubt
                for tokens in range(1, len(self.expected))
            ]
        self._choose(is_first)
        count = len(self.requests)
        soon = max(count, TURN_ROUNDS)
        self._renew_in = soon if self.plan.tokens or self.watches else WINDOW * count

    def ahead_seconds(self, proposed: int, outcomes: int, step_seconds: float | None) -> float:
        """Predicted seconds in which rounds that draft ahead make as much as a proposal of so many tokens does, if the
        draft's steps for so many outcomes take as long as that, or as predicted."""
        at_k = self.expected[: (self.compared.tokens or self.max_tokens) + 1]
        return self.expected[proposed] / at_k[-1] * self._ahead_seconds(at_k, outcomes, step_seconds)

    def _ahead_seconds(
        self, expected: Sequence[float], outcomes: int, step_seconds: float | None = None
    ) -> float:
        step = step_seconds or self.costs.draft_seconds(self.load, outcomes)
        hit_rate = self.gains.hit_rate(outcomes)
        return self.costs.seconds_ahead(self.load, expected, step, hit_rate, leads=self._leads)

    def _choose(self, is_first: bool) -> None:
        hoped = expected_tokens(self.gains.acceptance.rates(self.max_tokens, OPTIMISM))

        def hope(plan: Plan) -> float:
            # Drafting has to be better than the target alone by more than its optimism.
            return self._speed(plan, hoped) if plan.tokens else HYSTERESIS * self._speed(plan)

        was = self.plan.way
        plans = [
            Plan(tokens, outcomes if tokens else 0)
            for outcomes in self._seconds
            for tokens in self._lengths
            if outcomes or not tokens or 0 in self._outcomes
        ]
        self._best = {plan.way: plan for plan in sorted(plans, key=self._speed)}
        present = self.plan
        if present.outcomes:
            present = present._replace(outcomes=self._best[Way.AHEAD].outcomes)
        best = max(self._best.values(), key=hope)
        known = self.gains.acceptance.count
        if self._can_watch and self.load > 1 and known < WINDOW and not self._pays(-2.0 * OPTIMISM):
            best = present = ALONE
        self.plan = best if is_first or hope(best) > HYSTERESIS * hope(present) else present
        self._best[self.plan.way] = self.plan
        drafting = [plan for plan in self._best.values() if plan.tokens]
        self.compared = self.plan if self.plan.tokens else max(drafting, key=hope)
        if is_first or self.plan.way is not was:
            self._tried, self._lost = dict.fromkeys(Way, self._rounds), {}
        self._plan_turn()
        self.watches = self._can_watch and not self.plan.tokens and known < MEMORY and self._may_pay

    def hope(self, deviations: float) -> float:
        """Tokens per second of the best plan, with an acceptance that is so many standard deviations better."""
        expected = expected_tokens(self.gains.acceptance.rates(self.max_tokens, deviations))
        rows = self._seconds.values()
        return max(expected[tokens] / row[tokens] for row in rows for tokens in self._lengths)


class RequestSpeculation:
    """One request's part: `begin_round` says how many tokens to propose, `end_round` counts its result."""

    def __init__(self, controller: SpeculationController, terms: Terms) -> None:
        self.terms = terms
        self.target = ""
        """Address of the target that verifies."""
        self._controller = controller
        self._acceptance = RequestAcceptance()
        self.choice: Choice | None = None
        """The decision at the load of the round in progress; None before the first round."""
        self.load = 1
        """Sequences that share the target in the round in progress."""
        self.tokens = 0
        """K of the round in progress; 0: the target works alone."""
        self.watched_tokens = 0
        """Tokens to ask the draft for in the round in progress that are only compared with what comes; 0: none."""
        self._choice_target = ""
        self.rounds = self._phase = 0
        self._outcomes = self._granted = 0
        """Outcomes that the round in progress drafts ahead for, and those that the round before it did."""
        self._ahead_step: float | None = None
        """Seconds of the draft's last step for these; None if it has not told."""
        self._own_tokens: int | None = None
        """Best length for its own acceptance; None: follow the shared choice."""
        self._last_way: Way | None = None
        self._alike_rounds = 0
        """Rounds since the last one of another way of working."""
        self._beside = self._made = 0.0
        """Since the last proposal: seconds beyond those predicted of drafting ahead, and tokens then expected."""
        self._is_beginning = True
        controller.beginning += 1

    @property
    def gain(self) -> float:
        """Predicted tokens per second with the best K above 0, over those of the target alone; 0: unknown."""
        return 0.0 if self.choice is None else self.choice.gain

    def begin_round(self, load: int) -> int:
        """Number of tokens to propose in the round that begins; 0: the target works alone."""
        self.rounds += 1
        if self.rounds == 1:
            # Of many that begin together the first would not know that the others come.
            load = max(load, self._controller.beginning)
        elif self.rounds == 2:
            self._has_begun()
        if self.choice is None or load != self.load or self.target != self._choice_target:
            self.load, self._choice_target = load, self.target
            self._leave_choice()
            self.choice = self._controller.choice(self.target, self.terms, load)
            self.choice.requests[self] = None
            self._phase = len(self.choice.requests)
        self._granted = self._outcomes
        shared, self._outcomes = self.choice.begin_round()
        self.tokens = self._chosen(self.choice, shared) if self.terms.is_adaptive else self.terms.max_tokens
        self.watched_tokens = 0 if self.tokens else self.choice.watched_tokens(self)
        return self.tokens

    def came(self, proposed: int, came: int) -> None:
        """Of a proposal that was only watched so many tokens came."""
        if proposed and self.choice is not None:
            self.choice.gains.acceptance.add(proposed, came)

    @property
    def ahead_budget(self) -> AheadBudget | None:
        """How far the draft is to draft ahead of the round in progress; None for not at all."""
        if not self._outcomes or self.tokens <= 0:
            return None
        return AheadBudget(self._outcomes, min(self.tokens, MAX_AHEAD_TOKENS))

    def outcome_came(self, rank: int | None, step: StepCost | None = None) -> None:
        """An outcome has come that was awaited: its place, None if it was not drafted for; and what the draft's last
        step for it and the others took."""
        if self.choice is not None and self._granted:
            self.choice.gains.add_outcome(rank, self._granted)
            self._ahead_step = None if step is None else step.seconds
            if step is not None:
                self.choice.costs.draft.add(step.sequences, step.tokens, step.seconds, 1.0 / step.sequences)

    def tokens_after_miss(self, count: int) -> int:
        """How many tokens to ask for, up to `count`, where another outcome came than was drafted for.

        0: the target goes on alone, and the draft drafts ahead of that. With a fixed policy it is that or `count`.
        """
        choice, load = self.choice, self.load
        if choice is None or len(choice.expected) <= count:
            return count
        costs = choice.costs
        wait, step = costs.rest_seconds(Way.MISSED, load), costs.draft_seconds(load)
        return best_count(
            range(count + 1) if self.terms.is_adaptive else (0, count),
            choice.expected,
            lambda tokens: costs.verify_seconds(load, tokens) + (wait + tokens * step if tokens else 0.0),
            max(choice.tokens_per_second),
        )

    def asked_after_miss(self, tokens: int, seconds: float) -> None:
        """The draft has answered the question after a miss with so many tokens, after so long."""
        if self.choice is not None and self.choice.costs.draft.is_known:
            costs = self.choice.costs
            beside = max(seconds - tokens * costs.draft_seconds(self.load), 0.0)
            costs.add_rest(Way.MISSED, self.load, beside)

    def tokens_after_hit(self, unfinished: Unfinished, count: int) -> int:
        """How many tokens of a continuation to wait for, `count` at most, where the draft is still drafting it."""
        choice = self.choice
        most = min(count, unfinished.max_tokens)
        if choice is None or len(choice.expected) <= most:
            return unfinished.ready
        speed = max(choice.tokens_per_second)
        return tokens_after_hit(choice.expected[: most + 1], unfinished, tokens_per_second=speed)

    def end_round(self, result: RoundResult) -> None:
        """Count the round that has ended."""
        choice, cost, proposed, load = self.choice, result.cost, result.proposed, self.load
        if choice is None or cost is None:
            return
        if proposed:
            choice.gains.acceptance.add(proposed, result.accepted)
            self._acceptance.add(proposed, result.accepted, choice.rates)
        alone = Way.LED if cost.was_led else Way.ASKED
        way = Way.AHEAD if result.awaited_outcome else Way.DRAFTED if proposed else alone
        if self._granted and way is not Way.DRAFTED and len(choice.expected) > proposed:
            # A miss after which the target goes on alone belongs to the round that follows it.
            self._beside += cost.seconds - choice.ahead_seconds(proposed, self._granted, self._ahead_step)
            self._made += choice.expected[proposed]
        choice.spend(result, cost.seconds)
        if proposed or not self._granted:
            self._alike_rounds = self._alike_rounds + 1 if way is self._last_way else 1
            self._last_way = way
            beside, made = self._beside, self._made
            self._beside = self._made = 0.0
            if not proposed and choice.all_watch:
                return  # what is beside a draft that works for all is not alone
            if not proposed and (self.rounds + self._phase) % len(choice.requests):
                return  # of the target alone one request at a time tells, in turn: all share its steps
            if way is not Way.AHEAD:
                is_settled = self._alike_rounds > 1 and (proposed > 0 or self.rounds > TURN_ROUNDS)
                choice.costs.add(load, cost, is_settled=is_settled)
            elif (load == 1 or self._alike_rounds > 2) and made:
                # Many requests that begin to draft ahead together first wait for each other's steps.
                choice.costs.add_rest(way, load, beside / made)
        if cost.is_uniform(load) and not cost.was_late:
            choice.count(Way.ASKED if way is Way.LED else way, proposed, cost.seconds)

    def end(self) -> None:
        """The request has ended."""
        self._has_begun()
        self._leave_choice()

    def _has_begun(self) -> None:
        self._controller.beginning -= self._is_beginning
        self._is_beginning = False

    def _leave_choice(self) -> None:
        if self.choice is not None:
            self.choice.requests.pop(self, None)

    def _chosen(self, choice: Choice, shared: int) -> int:
        if not shared:
            return 0
        if self.rounds % WINDOW == 0:
            self._own_tokens = self._refined(choice)
        return shared if self._own_tokens is None else min(self._own_tokens, self.terms.max_tokens)

    def _refined(self, choice: Choice) -> int | None:
        """The best length for the request's own acceptance, where it is clearly better than the shared one.

        None for a lone request: what all know is what its newest proposals told.
        """
        if not choice.expected or len(choice.requests) == 1:
            return None
        if self._own_tokens == 0:
            self._acceptance.forget()
        expected = expected_tokens(choice.rates, self._acceptance.scale)
        speeds = [made / seconds for made, seconds in zip(expected, choice.seconds, strict=True)]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        return best if speeds[best] > HYSTERESIS * HYSTERESIS * speeds[choice.plan.tokens] else None


class SpeculationController:
    """Shared by all requests: the cost of rounds by target, acceptance by kind of request, one choice by load."""

    def __init__(self) -> None:
        self._services: defaultdict[str, ServiceCosts] = defaultdict(ServiceCosts)
        """By address of a target or name of a draft."""
        self._costs: dict[tuple[str, str, bool], CostModel] = {}
        """By target, draft, and whether the target leads when it is alone."""
        self._gains: dict[RequestKind, GainModel] = {}
        self._choices: dict[tuple[str, Terms, int], Choice] = {}
        """By target, terms and load class."""
        self.beginning = 0
        """Requests in their first round."""

    def introduce(self, service_name: str, model: ModelInfo | None, round_trip_seconds: float | None) -> None:
        """Tell what a service reports of itself, before a request that uses it. A newer profile starts its costs anew.

        Args:
            service_name: Address of a target, or name of a draft's model.
            model: What it serves, with the profile of its steps.
            round_trip_seconds: Of its health checks.
        """
        if model is not None:
            service = self._services[service_name]
            service.trip_seconds = round_trip_seconds or 0.0
            if model.step_profile.version > service.version:
                service.begin(model.step_profile)

    def costs(self, target: str, draft: str, *, leads: bool = False) -> CostModel:
        """The cost model of a target with a draft. Rules share it: their requests share the services' steps."""
        key = target, draft, leads
        if key not in self._costs:
            self._costs[key] = CostModel(self._services[target], self._services[draft], leads)
        return self._costs[key]

    def gains(self, kind: RequestKind) -> GainModel:
        """Acceptance of a kind. A new temperature range begins with the first rate of the nearest one."""
        if kind not in self._gains:
            alike = [other for other in self._gains if other[:2] == kind[:2]]
            nearest = min(
                alike, key=lambda other: abs(other.temperature_range - kind.temperature_range), default=None
            )
            first_rate = FIRST_RATE if nearest is None else self._gains[nearest].acceptance.rates(1)[0]
            self._gains[kind] = GainModel(first_rate)
        return self._gains[kind]

    def choice(self, target: str, terms: Terms, load: int) -> Choice:
        """The decision for requests on these terms at a load."""
        key = target, terms, load_class(load)
        if key not in self._choices:
            costs = self.costs(target, terms.kind.draft, leads=terms.leads)
            self._choices[key] = Choice(costs, self.gains(terms.kind), terms, load)
        return self._choices[key]

    def choose_rule(self, names: Sequence[str], draft: str, temperature: float, load: int) -> str:
        """The rule with the highest predicted tokens per second at the nearest load so far.

        One of few proposals is predicted by its optimistic acceptance, and so is tried.
        """
        return max(names, key=lambda name: self._hope(request_kind(draft, name, temperature), load))

    def _hope(self, kind: RequestKind, load: int) -> float:
        """Expected tokens per second with the acceptance that the rule may have at best."""
        known = [
            (target, terms, choice.load)
            for (target, terms, _), choice in self._choices.items()
            if terms.kind.draft == kind.draft and choice.expected
        ]
        if not known:
            return expected_tokens(self.gains(kind).acceptance.rates(1, 4.0 * OPTIMISM))[-1]
        target, terms, near = min(known, key=lambda each: abs(each[2] - load))
        costs = self.costs(target, kind.draft, leads=terms.leads)
        choice = Choice(costs, self.gains(kind), terms._replace(kind=kind), near)
        choice.renew()
        return choice.hope(4.0 * OPTIMISM)

    def decisions(self) -> Iterator[SpeculationDecision]:
        """Decisions for each target, kind and load seen so far."""
        for (target, terms, _), choice in self._choices.items():
            costs, load, kind = choice.costs, choice.load, terms.kind
            yield SpeculationDecision(
                target,
                kind.draft,
                kind.rule,
                temperature_words(kind.temperature_range),
                load,
                choice.plan.tokens,
                choice.compared.tokens if choice.expected else 0,
                choice.gain,
                choice.predicted_seconds,
                choice.measured_seconds,
                tuple(choice.seconds),
                tuple(choice.rates),
                costs.draft_seconds(load),
                costs.rest_seconds(Way.DRAFTED, load),
                choice.plan.outcomes,
                max(costs.rest_seconds(costs.alone, load), 0.0),
            )
