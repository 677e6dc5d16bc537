"""How many tokens each round proposes. Pure: no clock and no I/O.

The K of a round, possibly 0, is the one with the highest expected tokens per second at the current load:

    argmax over K of (1 + E[accepted(K)]) / seconds(load, K)

TurboSpec (Liu et al. 2024, arXiv 2406.14066) calls this goodput; vLLM's dynamic speculation chooses K by it. The
costs are known before the first round (`costs`). The acceptance is learnt from every proposal (`gains`), and taken
for what it may be at best while few were verified, so that drafting begins, and goes on until it is known not to pay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from coordinator.speculation.ahead import (
    AheadChoice,
    BranchCosts,
    DraftAhead,
    OutcomeHits,
    RequestAhead,
    Unfinished,
    tokens_after_hit,
    tokens_after_miss,
)
from coordinator.speculation.costs import NO_PROFILE, CostModel, StepCosts, load_class
from coordinator.speculation.gains import (
    FIRST_RATE,
    WINDOW,
    AcceptanceModel,
    RequestAcceptance,
    RequestKind,
    expected_tokens,
    request_kind,
    temperature_words,
)
from coordinator.stats.rounds import RoundResult
from tandem.speculation_state import SpeculationDecision
from tandem.types import AheadBudget, ModelInfo, StepProfile

HYSTERESIS = 1.03
"""Factor in predicted tokens per second by which another length must be better: the standard error of the rates."""
OPTIMISM = 0.5
"""Standard deviations by which the acceptance may be better than known, in the decision between drafting and not. In
simulations 1 loses 1 % of the first 100 rounds, and 1.5 3 %."""
PROBE_SHARE = 0.01
"""Share of the rounds, and of their time, in which drafts propose while the target works alone."""
PROBE_ROUNDS = 3
"""Rounds of one request in such a probe: the draft reads the tokens since the last one only once."""
SURPRISE = 2.0
"""A probe that accepts this many times the expected tokens, and one more, is followed by another at once. By chance
one in ten does."""
RENEWAL_ROUNDS = 32
"""Rounds of each request between two decisions, doubled up to this number from 1 on. A decision takes 40 us, so that
its share of a round is 1 us; with 16 from the first round on, simulations make 1 % fewer tokens."""
BURST = 4
"""Requests that may begin at once with a draft stream. When more arrive at once, the later ones open no draft stream
until the load is known: a draft that is not needed would read their prompts in vain."""

_UNKNOWN = NO_PROFILE, 0.0
"""Profile and round trip of a service before it has reported."""


class Choice:
    """The decision for one kind of request at one load."""

    __slots__ = (
        "_is_first",
        "_next_probe",
        "_pause",
        "_renew_in",
        "_rounds",
        "_surprise",
        "ahead_outcomes",
        "best_drafting",
        "costs",
        "expected",
        "gains",
        "is_fixed",
        "load",
        "max_tokens",
        "measured_seconds",
        "predicted_seconds",
        "rates",
        "round_seconds",
        "tokens",
        "tokens_per_second",
    )

    def __init__(self, costs: CostModel, gains: AcceptanceModel, load: int, max_tokens: int) -> None:
        self.costs = costs
        self.gains = gains
        self.load = load
        self.max_tokens = max_tokens
        """Tokens of the longest proposal."""
        self.ahead_outcomes = 0
        """Outcomes that a round drafted ahead for last; 0: none did yet."""
        self.tokens = max_tokens
        """K."""
        self.is_fixed = False
        """True if the last round proposed `max_tokens` by a fixed policy, whatever pays."""
        self.best_drafting = 0
        """The best K above 0 by prediction; 0 before any prediction."""
        self.rates: list[float] = []
        """Conditional acceptance by position."""
        self.expected: list[float] = []
        """Expected tokens of a round, by proposed tokens."""
        self.round_seconds: list[float] = []
        """Predicted seconds of a round, by proposed tokens; empty before anything is known."""
        self.tokens_per_second: list[float] = []
        """Predicted tokens per second of each request, by proposed tokens."""
        self.predicted_seconds = 0.0
        self.measured_seconds = 0.0
        """Measured seconds of the rounds that were also predicted."""
        self._rounds = 0
        self._renew_in = 0
        self._pause = 1
        self._next_probe = 0
        self._surprise = 0.0
        """Tokens that the present probe has accepted beyond twice the expected ones and one."""
        self._is_first = True

    @property
    def gain(self) -> float:
        """Predicted tokens per second with `compared`, over those of the target alone; 0: unknown."""
        speeds = self.tokens_per_second
        return speeds[self.compared] / speeds[0] if speeds else 0.0

    @property
    def compared(self) -> int:
        """The K above 0 that the target alone is compared with: the present one, or the best."""
        return self.proposed or self.best_drafting

    @property
    def proposed(self) -> int:
        """K of the rounds at this load."""
        return self.max_tokens if self.is_fixed else self.tokens

    def begin_round(self) -> int:
        """K of the round that begins."""
        self._rounds += 1
        self._renew_in -= 1
        if self._renew_in <= 0:
            self._renew()
        return self.tokens

    def begin_probe(self) -> int:
        """K of a probe, if one of the requests should begin one while the target works alone; else 0."""
        if self.tokens or self._rounds < self._next_probe or not self.max_tokens:
            return 0
        self._schedule_probe()
        self._surprise = -1.0
        return self.best_drafting

    def _schedule_probe(self) -> None:
        seconds = self.round_seconds
        dearness = max(seconds[self.best_drafting] / max(seconds[0], 1e-9), 1.0)
        self._next_probe = self._rounds + int(PROBE_ROUNDS * self.load * dearness / PROBE_SHARE)

    def count(self, proposed: int, seconds: float) -> None:
        """Count a uniform round at this load."""
        if proposed < len(self.round_seconds):
            self.predicted_seconds += self.round_seconds[proposed]
            self.measured_seconds += seconds

    def probed(self, proposed: int, accepted: int) -> None:
        """Count a proposal made while the target works alone. After a surprise the next probe follows at once."""
        self._surprise += accepted - SURPRISE * (self.expected[proposed] - 1.0)
        if self._surprise > 0.0:
            self._renew_in, self._pause = 0, 1
            self._next_probe = self._rounds

    def _renew(self) -> None:
        """Predict again, and change K where another is clearly better."""
        costs, load = self.costs, self.load
        if not costs.is_known or not self.max_tokens:
            return
        self._renew_in = self._pause * load
        self._pause = min(2 * self._pause, RENEWAL_ROUNDS)
        self.rates = self.gains.rates(self.max_tokens)
        self.expected = expected_tokens(self.rates)
        self.round_seconds = [costs.seconds(load, count) for count in range(self.max_tokens + 1)]
        self.tokens_per_second = _speeds(self.expected, self.round_seconds)
        hopeful = _speeds(expected_tokens(self.gains.rates(self.max_tokens, OPTIMISM)), self.round_seconds)
        alone = self.tokens_per_second[0]
        best = max(range(1, self.max_tokens + 1), key=self.tokens_per_second.__getitem__)
        if self.tokens_per_second[best] < HYSTERESIS * alone:
            best = max(range(1, self.max_tokens + 1), key=hopeful.__getitem__)
        self.best_drafting = best
        was = self.tokens
        pays = HYSTERESIS * (1.0 if was else HYSTERESIS)
        if hopeful[best] <= pays * alone:
            self.tokens = 0
            if was:
                self._schedule_probe()
        elif not was or self._is_first or hopeful[best] > HYSTERESIS * hopeful[was]:
            self.tokens = best
        self._is_first = False


def _speeds(expected: Sequence[float], seconds: Sequence[float]) -> list[float]:
    return [tokens / max(second, 1e-9) for tokens, second in zip(expected, seconds, strict=True)]


class Decision(NamedTuple):
    """How much one round proposes, and why."""

    tokens: int
    """K; 0: the target works alone."""
    load: int
    """Sequences that share the target."""
    gain: float
    """Predicted tokens per second with the best K above 0, over those of the target alone; 0: unknown."""


class RequestSpeculation:
    """One request's part: `begin_round` says how many tokens to propose, `end_round` counts its result."""

    __slots__ = (
        "_acceptance",
        "_ahead_choice",
        "_choice",
        "_choice_target",
        "_controller",
        "_has_begun",
        "_load",
        "_own_tokens",
        "_probe_rounds",
        "_probe_tokens",
        "_rounds",
        "_tokens",
        "_was_ahead",
        "ahead",
        "is_adaptive",
        "kind",
        "max_tokens",
        "target",
    )

    def __init__(
        self,
        controller: SpeculationController,
        kind: RequestKind,
        max_tokens: int,
        is_adaptive: bool,
        ahead: RequestAhead,
    ) -> None:
        self.kind = kind
        self.max_tokens = max_tokens
        self.target = ""
        """Address of the target that verifies."""
        self._controller = controller
        self.ahead = ahead
        """How far its rounds draft ahead."""
        self.is_adaptive = is_adaptive
        self._ahead_choice = AheadChoice(1)
        self._was_ahead = False
        self._acceptance = RequestAcceptance()
        self._choice: Choice | None = None
        self._choice_target = ""
        self._load = 1
        self._rounds = 0
        self._tokens = -1
        self._own_tokens: int | None = None
        """Best length for its own acceptance; None: follow the shared choice."""
        self._probe_rounds = 0
        self._probe_tokens = 0
        self._has_begun = False
        controller.beginning += 1

    @property
    def choice(self) -> Choice | None:
        """Choice at the load of the round in progress; None before the first round."""
        return self._choice

    @property
    def is_probe(self) -> bool:
        """True if the round in progress proposes only to learn whether drafting pays."""
        return self._probe_rounds > 0

    @property
    def decision(self) -> Decision:
        """The round in progress."""
        choice = self._choice
        return Decision(max(self._tokens, 0), self._load, 0.0 if choice is None else choice.gain)

    def begin_round(self, load: int) -> int:
        """Number of tokens to propose in the round that begins; 0: the target works alone.

        Args:
            load: Sequences that share the target now, this one included.
        """
        self._rounds += 1
        if self._rounds == 2:
            self._leave_beginning()
        controller, target, kind = self._controller, self.target, self.kind
        choice = self._choice
        if choice is None or load != self._load or target != self._choice_target:
            self._ahead_choice = controller.ahead_choice(target, kind, load)
            choice, self._load, self._choice_target = None, load, target
        drafts_ahead = self.ahead.begin_round(self._ahead_choice)
        if choice is None or drafts_ahead != self._was_ahead:
            choice = self._choice = controller.choice(target, kind, load, self.max_tokens, drafts_ahead)
            self._was_ahead = drafts_ahead
        choice.is_fixed = not self.is_adaptive
        shared = choice.begin_round()
        self._tokens = self._chosen(choice, shared) if self.is_adaptive else self.max_tokens
        return self._tokens

    @property
    def ahead_budget(self) -> AheadBudget | None:
        """How far the draft is to draft ahead of the round in progress; None for not at all."""
        choice = self._choice
        return None if choice is None else self.ahead.budget(self._tokens, choice)

    def tokens_after_miss(self, count: int) -> int:
        """How many tokens to ask for, up to `count`, where another outcome came than was drafted for.

        0: the target goes on alone, and the draft drafts ahead of that. With a fixed policy it is that or `count`.
        """
        choice = self._choice
        if choice is None or len(choice.expected) <= count:
            return count
        costs, load = choice.costs, choice.load
        wait_seconds = self.ahead.question_seconds
        if wait_seconds is None:
            wait_seconds = max(costs.rest_seconds(load, count) - costs.rest_seconds(load, 0), 0.0)
        return tokens_after_miss(
            choice.expected,
            [costs.verify_seconds(load, tokens) for tokens in range(count + 1)],
            counts=range(count + 1) if self.is_adaptive else (0, count),
            draft_seconds=costs.draft_seconds(load),
            wait_seconds=wait_seconds,
            tokens_per_second=max(choice.tokens_per_second, default=0.0),
        )

    def asked_after_miss(self, tokens: int, seconds: float) -> None:
        """The draft has answered the question after a miss with so many tokens, after so long."""
        choice = self._choice
        if choice is not None and choice.costs.draft.is_known:
            self.ahead.asked(seconds - tokens * choice.costs.draft_seconds(choice.load))

    def tokens_after_hit(self, unfinished: Unfinished, count: int) -> int:
        """How many tokens of a continuation to wait for, `count` at most, where the draft is still drafting it."""
        choice = self._choice
        most = min(count, unfinished.max_tokens)
        if choice is None or len(choice.expected) <= most:
            return unfinished.ready
        return tokens_after_hit(
            choice.expected[: most + 1],
            unfinished,
            tokens_per_second=max(choice.tokens_per_second, default=0.0),
        )

    def end_round(self, result: RoundResult) -> None:
        """Count the round that has ended."""
        choice, cost, proposed = self._choice, result.cost, result.proposed
        if choice is None or cost is None:
            return
        if proposed:
            choice.gains.add(proposed, result.accepted)
            self._acceptance.add(proposed, result.accepted, choice.rates)
            if self._probe_rounds and not choice.tokens:
                choice.probed(min(proposed, choice.max_tokens), result.accepted)
        tokens = choice.expected[proposed] if len(choice.expected) > proposed else 1.0 + result.accepted
        self.ahead.end_round(self._ahead_choice, tokens, cost.seconds)
        choice.costs.add(self._load, cost)
        if cost.is_uniform and not cost.was_late:
            choice.count(proposed, cost.seconds)

    def end(self) -> None:
        """The request has ended."""
        self._leave_beginning()

    def _leave_beginning(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._controller.beginning -= 1

    def _chosen(self, choice: Choice, shared: int) -> int:
        if self._rounds == 1 and self._controller.beginning > BURST:
            return 0
        if self._probe_rounds > 0:
            self._probe_rounds -= 1
        if self._probe_rounds:
            return self._probe_tokens
        if not shared and self._rounds > 1 and (probe := choice.begin_probe()):
            # In its first round the draft reads what was committed since the last one.
            self._probe_tokens, self._probe_rounds = probe, PROBE_ROUNDS + 1
            return probe
        if not shared:
            return 0
        if self._rounds % WINDOW == 0:
            self._own_tokens = self._refined(choice)
        return shared if self._own_tokens is None else min(self._own_tokens, self.max_tokens)

    def _refined(self, choice: Choice) -> int | None:
        """The best length for the request's own acceptance, where it is clearly better than the shared one."""
        if not choice.round_seconds:
            return None
        if self._own_tokens == 0:
            self._acceptance.forget()
        speeds = _speeds(expected_tokens(choice.rates, self._acceptance.scale), choice.round_seconds)
        best = max(range(len(speeds)), key=speeds.__getitem__)
        return best if speeds[best] > HYSTERESIS * HYSTERESIS * speeds[choice.tokens] else None


class SpeculationController:
    """Shared by all requests: the cost of rounds by target, acceptance by kind of request, one choice by load."""

    def __init__(self) -> None:
        self._profiles: dict[str, tuple[StepProfile, float]] = {}
        """By address of a target or name of a draft: its profile, and the seconds of a round trip to it."""
        self._costs: dict[tuple[str, str, str, bool], CostModel] = {}
        """By target, draft, rule, and whether rounds draft ahead."""
        self._gains: dict[RequestKind, AcceptanceModel] = {}
        self._choices: dict[tuple[str, RequestKind, int, int, bool], Choice] = {}
        self._ahead_choices: dict[tuple[str, RequestKind, int], AheadChoice] = {}
        self._outcome_hits: defaultdict[RequestKind, OutcomeHits] = defaultdict(OutcomeHits)
        self._branch_costs = BranchCosts()
        self._rule_choices = 0
        self.beginning = 0
        """Requests in their first round."""

    def introduce(self, service: str, model: ModelInfo | None, round_trip_seconds: float | None) -> None:
        """Tell what a service reports of itself, before the first request that uses it.

        Args:
            service: Address of a target, or name of a draft's model.
            model: What it serves, with the profile of its steps.
            round_trip_seconds: Of its health checks.
        """
        if model is not None and service not in self._profiles:
            self._profiles[service] = model.step_profile, round_trip_seconds or 0.0

    def request(
        self,
        kind: RequestKind,
        max_tokens: int,
        *,
        is_adaptive: bool = True,
        draft_ahead: DraftAhead = "off",
    ) -> RequestSpeculation:
        """A request begins.

        Args:
            kind: Whose acceptance it shares.
            max_tokens: Tokens of its longest proposal.
            is_adaptive: Whether measurements may change how much it proposes; not under a fixed policy.
            draft_ahead: How far its rounds draft ahead.
        """
        ahead = RequestAhead(draft_ahead, self._outcome_hits[kind], self._branch_costs)
        return RequestSpeculation(self, kind, max_tokens, is_adaptive, ahead)

    def costs(self, target: str, kind: RequestKind, drafts_ahead: bool = False) -> CostModel:
        """The cost model of a target with a draft under a rule. One without a profile begins like another one."""
        key = target, kind.draft, kind.rule, drafts_ahead
        found = self._costs.get(key)
        if found is None:
            target_profile, target_trip = self._profiles.get(target, _UNKNOWN)
            draft_profile, draft_trip = self._profiles.get(kind.draft, _UNKNOWN)
            alike = [
                model for other, model in self._costs.items() if other[1] == kind.draft and model.is_known
            ]
            known = alike[-1] if alike else None
            found = self._costs[key] = CostModel(
                known.target.copy() if known and not target_profile.seconds else StepCosts(target_profile),
                known.draft.copy() if known and not draft_profile.seconds else StepCosts(draft_profile),
                target_trip,
                draft_trip,
            )
        return found

    def gains(self, kind: RequestKind) -> AcceptanceModel:
        """Acceptance of a kind. A new temperature range begins with the first rate of the nearest one."""
        found = self._gains.get(kind)
        if found is None:
            alike = [other for other in self._gains if other[:2] == kind[:2]]
            nearest = min(
                alike, key=lambda other: abs(other.temperature_range - kind.temperature_range), default=None
            )
            first_rate = FIRST_RATE if nearest is None else self._gains[nearest].rates(1)[0]
            found = self._gains[kind] = AcceptanceModel(first_rate)
        return found

    def choice(
        self, target: str, kind: RequestKind, load: int, max_tokens: int, drafts_ahead: bool = False
    ) -> Choice:
        """The decision for a kind of request at a load."""
        key = target, kind, load_class(load), max_tokens, drafts_ahead
        found = self._choices.get(key)
        if found is None:
            costs = self.costs(target, kind, drafts_ahead)
            found = self._choices[key] = Choice(costs, self.gains(kind), load, max_tokens)
        return found

    def ahead_choice(self, target: str, kind: RequestKind, load: int) -> AheadChoice:
        """The choice of drafting ahead for a kind of request at a load."""
        key = target, kind, load_class(load)
        found = self._ahead_choices.get(key)
        if found is None:
            found = self._ahead_choices[key] = AheadChoice(load)
        return found

    def choose_rule(self, names: Sequence[str], draft: str, temperature: float, load: int) -> str:
        """The rule with the highest predicted tokens per second at the nearest load so far.

        One of few proposals is predicted by its optimistic acceptance, and so is tried.

        Args:
            names: Rules to choose from, the first preferred.
            draft: Name of the draft's model.
            temperature: Of the request.
            load: Sequences that share a target.
        """
        return max(names, key=lambda name: self._hope(request_kind(draft, name, temperature), load))

    def _hope(self, kind: RequestKind, load: int) -> float:
        """Expected tokens per second with the acceptance that the rule may have at best."""
        known = [choice for (_, other, *_), choice in self._choices.items() if other.draft == kind.draft]
        seconds = min(known, key=lambda choice: abs(choice.load - load)).round_seconds if known else []
        rates = self.gains(kind).rates(max(len(seconds) - 1, 1), 4.0 * OPTIMISM)
        return max(_speeds(expected_tokens(rates), seconds)) if seconds else expected_tokens(rates)[-1]

    def decisions(self) -> Iterator[SpeculationDecision]:
        """Decisions for each target, kind and load seen so far, with drafting ahead and without it."""
        for (target, kind, *_, drafts_ahead), choice in self._choices.items():
            costs, load = choice.costs, choice.load
            yield SpeculationDecision(
                target,
                kind.draft,
                kind.rule,
                temperature_words(kind.temperature_range),
                load,
                choice.proposed,
                choice.compared if choice.tokens_per_second else 0,
                choice.gain,
                choice.predicted_seconds,
                choice.measured_seconds,
                tuple(choice.round_seconds),
                tuple(choice.rates),
                costs.draft_seconds(load),
                costs.rest_seconds(load, choice.max_tokens),
                choice.ahead_outcomes if drafts_ahead else None,
            )
