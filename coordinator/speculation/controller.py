"""How many tokens each round proposes, and how far the draft works ahead. Pure: no clock and no I/O.

The K of a round, possibly 0, is the one with the highest expected tokens per second at the current load:

    argmax over K of (1 + E[accepted(K)]) / seconds(load, K)

TurboSpec (Liu et al. 2024, arXiv 2406.14066) calls this goodput; vLLM's dynamic speculation chooses K by it. The
costs are known before the first round (`costs`). The acceptance is learnt from every proposal (`gains`), and taken
for what it may be at best while few were verified, so that drafting begins, and goes on until it is known not to pay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from coordinator.rejection.strategies import GREEDY, STRICT
from coordinator.speculation.ahead import (
    AheadModel,
    DraftAhead,
    Unfinished,
    outcome_choices,
    tokens_after_hit,
    tokens_after_miss,
)
from coordinator.speculation.costs import (
    NO_PROFILE,
    SURPRISE,
    TARGET_COMMON,
    CostModel,
    StepCosts,
    load_class,
)
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
from tandem.types import MAX_AHEAD_TOKENS, AheadBudget, ModelInfo, StepProfile

HYSTERESIS = 1.03
"""Factor in predicted tokens per second by which another choice must be better: the standard error of the rates."""
OPTIMISM = 0.5
"""Standard deviations by which the acceptance may be better than known, in the decision between drafting and not. In
simulations 1 loses 1 % of the first 100 rounds, and 1.5 3 %."""
TURN_SHARE = 0.005
"""Share of the tokens that is lost by rounds that try what was not chosen: the target alone, drafting, or drafting
ahead."""
TURN_ROUNDS = 4
"""Rounds of one request in such a turn: the target alone is asked for the first, and settles after the second; a draft
reads in the first what was committed since the last turn."""
HOPELESS = 0.9
"""Predicted gain below which one request alone tries drafting: what rounds of all take is rarely known so badly."""
TURN_WAIT_ROUNDS = 24
"""Rounds of one request after which a turn without enough proposals is given up."""
RENEWAL_ROUNDS = 8
"""Rounds of each request between two decisions, doubled up to this number from 1 on. A decision takes 40 us, so that
its share of a round is 5 us. With 32 the demo pair makes a tenth fewer of its first hundred tokens."""
BURST = 4
"""Requests that may begin at once with a draft stream. When more arrive at once, the later ones open no draft stream
until the load is known: a draft that is not needed would read their prompts in vain."""


class Way(NamedTuple):
    """Rounds that draft ahead, or rounds that do not."""

    outcomes: int
    """How many outcomes of a verification the draft works ahead for; 0: it does not."""
    seconds: list[float]
    """Predicted seconds of a round, by proposed tokens. Of one that drafts ahead: of as many tokens as such a round
    makes without."""

    def speeds(self, expected: Sequence[float]) -> list[float]:
        """Tokens per second by proposed tokens."""
        return [tokens / max(seconds, 1e-9) for tokens, seconds in zip(expected, self.seconds, strict=True)]


_UNKNOWN = Way(0, [])
_DECIDED_BY_TOKENS = (GREEDY.name, STRICT.name)
"""Rules by which a target that leads can decide rounds with a proposal."""


class Choice:
    """The decision for one kind of request at one load."""

    def __init__(
        self,
        costs: CostModel,
        gains: AcceptanceModel,
        ahead: AheadModel,
        load: int,
        lengths: Sequence[int],
        outcomes: Sequence[int] = (0,),
    ) -> None:
        """
        Args:
            ahead: What drafting ahead changes.
            lengths: Numbers of tokens to choose from, ascending; a fixed policy leaves one.
            outcomes: Numbers of outcomes to choose from, ascending; 0: not ahead.
        """
        self.costs = costs
        self.gains = gains
        self.ahead = ahead
        self.load = load
        self._lengths = lengths
        self._outcomes = outcomes
        self.tokens = self.max_tokens = lengths[-1]
        """K, and the longest one."""
        self.way = self._other_way = _UNKNOWN._replace(outcomes=outcomes[0])
        """How rounds are, and how they might be."""
        self.best_drafting = 0
        """The best K above 0 by prediction; 0 before any prediction."""
        self.rates: list[float] = []
        """Conditional acceptance by position."""
        self.expected: list[float] = []
        """Expected tokens of a round, by proposed tokens."""
        self.tokens_per_second: list[float] = []
        """Predicted tokens per second of each request, by proposed tokens; empty before anything is known."""
        self.predicted_seconds = 0.0
        self.measured_seconds = 0.0
        """Measured seconds of the rounds that were also predicted."""
        self._rounds = 0
        self._renew_in = 0
        self._pause = 1
        self._turn: tuple[int, int] | None = None
        """K and outcomes of the turn in progress."""
        self._turn_of: RequestSpeculation | None = None
        """The only request whose turn it is; None: that of all."""
        self._next_turn = self._turn_end = self._turn_rounds = 0
        """Rounds: the first of the next turn, the last of this one, and those that it still needs."""
        self._turn_pause = 2 * TURN_ROUNDS * load
        self._was_alone = False
        """True if the last turn was of the target alone."""

    def of_other(self, costs: CostModel, gains: AcceptanceModel, ahead: AheadModel) -> Choice:
        """The decision for another kind of request, with the same choices, as it would be now."""
        other = Choice(costs, gains, ahead, self.load, self._lengths, self._outcomes)
        other._renew()
        return other

    @property
    def gain(self) -> float:
        """Predicted tokens per second with `compared`, over those of the target alone; 0: unknown."""
        speeds = self.tokens_per_second
        return speeds[self.compared] / speeds[0] if speeds else 0.0

    @property
    def compared(self) -> int:
        """The K above 0 that the target alone is compared with: the present one, or the best."""
        return self.tokens or self.best_drafting

    def begin_round(self, request: RequestSpeculation) -> tuple[int, int]:
        """K of the request's round that begins, and the outcomes that it drafts ahead for."""
        self._rounds += 1
        self._renew_in -= 1
        if self._turn is not None and (self._turn_rounds <= 0 or self._rounds >= self._turn_end):
            self._turn, self._renew_in = None, 0
        if self._renew_in <= 0:
            self._renew()
        if self._turn is None and self.expected and self._rounds >= self._next_turn:
            self._begin_turn(request)
        is_turn = self._turn is not None and self._turn_of in (None, request)
        return self._turn if self._turn is not None and is_turn else (self.tokens, self.way.outcomes)

    def _begin_turn(self, request: RequestSpeculation) -> None:
        """Let some rounds go as they might. What is known of it is a prediction, or old. The first turns come early.

        Those of all requests: one that drafts beside others that do not takes what it never takes otherwise. Where
        the draft is far from paying, one request shows whether its acceptance has changed.
        """
        load, other = self.load, self._other_way
        has_other = bool(other.seconds) and len(self._outcomes) > 1
        # A gain beyond any surprise is compared later: a prediction may still be wrong by more.
        is_clear = self._turn_pause <= 2 * TURN_ROUNDS * load and self.gain >= SURPRISE
        may_be_alone = self.tokens > 0 and len(self._lengths) > 1 and not is_clear
        self._turn_of = None
        if not self.tokens:
            self._turn, seconds = (
                (self.best_drafting, self.way.outcomes),
                self.way.seconds[self.best_drafting],
            )
            if self.gain < HOPELESS and load > 1:
                self._turn_of = request
            else:
                self.costs.doubt_drafted(load, self.best_drafting)
        elif may_be_alone and not (self._was_alone and has_other):
            self._turn, seconds = (0, 0), self.way.seconds[0]
            self.costs.doubt_alone(load)
        elif has_other:
            self._turn, seconds = (self.tokens, other.outcomes), other.seconds[self.tokens]
            self.ahead.calibration(is_ahead=not self.way.outcomes).doubt(load, self.expected[self.tokens])
        else:
            self._turn_pause *= 8
            self._next_turn = self._rounds + self._turn_pause
            return
        self._was_alone = self._turn[0] == 0
        self._turn_rounds = TURN_ROUNDS * (load if self._turn_of is None else 1)
        self._turn_end = self._rounds + (TURN_WAIT_ROUNDS if self._turn[0] else TURN_ROUNDS) * load
        dearness = max(seconds / max(self.way.seconds[self.tokens], 1e-9), 1.0)
        speed = self.expected[self._turn[0]] / max(seconds, 1e-9)
        lost = 1.0 - speed / self.tokens_per_second[self.tokens]
        usual = int(TURN_ROUNDS * load * dearness * max(lost, 1.0 - HOPELESS) / TURN_SHARE)
        # Where two things are to be tried, the second follows as soon as the first.
        self._turn_pause = min((1 if self._was_alone and has_other else 4) * self._turn_pause, usual)
        if not self.tokens and self.gains.proposals < WINDOW:  # bad luck with the first ones is likely
            self._turn_pause = min(self._turn_pause, 4 * TURN_ROUNDS * load)
        self._next_turn = self._rounds + self._turn_pause

    @property
    def plain(self) -> Way:
        """Rounds that do not draft ahead."""
        return self._other_way if self.way.outcomes else self.way

    def proposed(self, request: RequestSpeculation) -> None:
        """Count a proposal of a request towards the turn in progress."""
        self._turn_rounds -= self._turn_of in (None, request)

    def count(self, proposed: int, seconds: float) -> None:
        """Count a uniform round at this load."""
        if proposed < len(self.way.seconds):
            self.predicted_seconds += self.way.seconds[proposed]
            self.measured_seconds += seconds

    def _renew(self) -> None:
        """Predict again, and change what another choice is clearly better than."""
        if not self.costs.is_known:
            return
        self._renew_in = self._pause * self.load
        self._pause = min(2 * self._pause, RENEWAL_ROUNDS)
        is_first = not self.expected
        if is_first:
            self._next_turn = self._rounds + self._turn_pause
        self.rates = self.gains.rates(self.max_tokens)
        self.expected = expected_tokens(self.rates)
        self._choose_way(is_first)
        self.tokens_per_second = self.way.speeds(self.expected)
        if len(self._lengths) > 1:
            self._choose_length(is_first)

    def _choose_way(self, is_first: bool) -> None:
        costs, load, expected = self.costs, self.load, self.expected
        plain = Way(0, [costs.seconds(load, count) for count in range(len(expected))])
        # A round with a proposal contains one without: what was measured of the target alone may be old.
        plain.seconds[0] = min(plain.seconds)
        choices = [count for count in self._outcomes if count > 0]
        if not choices:
            self.way = plain
            return

        def speed(tokens: int, outcomes: int) -> float:
            return self.ahead.speed(costs, load, expected[: tokens + 1], outcomes)

        outcomes = max(choices, key=lambda count: speed(self.compared, count))
        factor = self.ahead.factor(load)
        ahead = Way(
            outcomes,
            [plain.seconds[0]]
            + [expected[tokens] / speed(tokens, outcomes) / factor for tokens in range(1, len(expected))],
        )
        ahead.seconds[0] = plain.seconds[0] = min(ahead.seconds)
        lengths = [length for length in self._lengths if length]
        best_ahead, best_plain = (
            max(way.speeds(expected)[length] for length in lengths) for way in (ahead, plain)
        )
        was_ahead = self.way.outcomes > 0
        margin = 1.0 if is_first else 1.0 / HYSTERESIS if was_ahead else HYSTERESIS
        is_ahead = self._outcomes[0] > 0 or best_ahead > margin * best_plain
        self.way, self._other_way = (ahead, plain) if is_ahead else (plain, ahead)

    def _choose_length(self, is_first: bool) -> None:
        speeds, lengths, was = self.tokens_per_second, self._lengths[1:], self.tokens
        hopeful = self.way.speeds(expected_tokens(self.gains.rates(self.max_tokens, OPTIMISM)))
        best = max(lengths, key=speeds.__getitem__)
        if speeds[best] < HYSTERESIS * speeds[0]:
            best = max(lengths, key=hopeful.__getitem__)
        self.best_drafting = best
        if hopeful[best] <= HYSTERESIS * (1.0 if was else HYSTERESIS) * speeds[0]:
            self.tokens = 0
            if was:  # what nobody has ever seen propose is asked at once
                is_new = is_first and self.gains.proposals < WINDOW
                self._turn_pause = 2 * TURN_ROUNDS * self.load
                self._next_turn = self._rounds + (0 if is_new else self._turn_pause)
        elif not was or is_first or hopeful[best] > HYSTERESIS * hopeful[was]:
            self.tokens = best


class RequestSpeculation:
    """One request's part: `begin_round` says how many tokens to propose, `end_round` counts its result."""

    def __init__(
        self,
        controller: SpeculationController,
        kind: RequestKind,
        max_tokens: int,
        is_adaptive: bool,
        draft_ahead: DraftAhead,
        leads: bool = False,
    ) -> None:
        self.kind = kind
        self.max_tokens = max_tokens
        self.is_adaptive = is_adaptive
        self._leads = leads
        self.target = ""
        """Address of the target that verifies."""
        self._controller = controller
        self._draft_ahead = draft_ahead
        self._acceptance = RequestAcceptance()
        self.choice: Choice | None = None
        """The decision at the load of the round in progress; None before the first round."""
        self.load = 1
        """Sequences that share the target in the round in progress."""
        self.tokens = 0
        """K of the round in progress; 0: the target works alone."""
        self._choice_target = ""
        self._rounds = 0
        self._outcomes = self._granted = 0
        """Outcomes that the round in progress drafts ahead for, and those that the round before it did."""
        self._own_tokens: int | None = None
        """Best length for its own acceptance; None: follow the shared choice."""
        self._alike_rounds = 0
        """Rounds since the last one of another kind: with a proposal, begun by the target, or neither."""
        self._last_kind = (False, False)
        self._awaited_rounds = 0
        """Rounds that the draft worked ahead of, since the last one that it did not."""
        self._is_beginning = True
        controller.beginning += 1

    @property
    def gain(self) -> float:
        """Predicted tokens per second with the best K above 0, over those of the target alone; 0: unknown."""
        return 0.0 if self.choice is None else self.choice.gain

    def begin_round(self, load: int) -> int:
        """Number of tokens to propose in the round that begins; 0: the target works alone."""
        self._rounds += 1
        if self._rounds == 2:
            self.end()
        choice = self.choice
        if choice is None or load != self.load or self.target != self._choice_target:
            self.load, self._choice_target = load, self.target
            choice = self.choice = self._controller.choice(
                self.target,
                self.kind,
                load,
                self.max_tokens,
                is_adaptive=self.is_adaptive,
                draft_ahead=self._draft_ahead,
                leads=self._leads,
            )
        self._granted = self._outcomes
        shared, self._outcomes = choice.begin_round(self)
        self.tokens = self._chosen(choice, shared) if self.is_adaptive else self.max_tokens
        return self.tokens

    @property
    def ahead_budget(self) -> AheadBudget | None:
        """How far the draft is to draft ahead of the round in progress; None for not at all."""
        if not self._outcomes or self.tokens <= 0:
            return None
        return AheadBudget(self._outcomes, min(self.tokens, MAX_AHEAD_TOKENS))

    def outcome_came(self, rank: int | None) -> None:
        """An outcome has come that was awaited: its place, None if it was not drafted for."""
        if self.choice is not None:
            self.choice.ahead.hits.add(rank, self._granted)

    def tokens_after_miss(self, count: int) -> int:
        """How many tokens to ask for, up to `count`, where another outcome came than was drafted for.

        0: the target goes on alone, and the draft drafts ahead of that. With a fixed policy it is that or `count`.
        """
        choice = self.choice
        if choice is None or len(choice.expected) <= count:
            return count
        costs, load = choice.costs, choice.load
        wait_seconds = choice.ahead.question.value
        if wait_seconds is None:
            wait_seconds = max(costs.asked_seconds(load, count) - costs.asked_seconds(load, 0), 0.0)
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
        choice = self.choice
        if choice is not None and choice.costs.draft.is_known:
            beside = seconds - tokens * choice.costs.draft_seconds(choice.load)
            choice.ahead.question.add(max(beside, 0.0))

    def tokens_after_hit(self, unfinished: Unfinished, count: int) -> int:
        """How many tokens of a continuation to wait for, `count` at most, where the draft is still drafting it."""
        choice = self.choice
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
        choice, cost, proposed = self.choice, result.cost, result.proposed
        if choice is None or cost is None:
            return
        if proposed:
            choice.proposed(self)
            choice.gains.add(proposed, result.accepted)
            self._acceptance.add(proposed, result.accepted, choice.rates)
        is_ahead = result.awaited_outcome
        kind = proposed > 0, cost.was_led and not proposed
        self._alike_rounds = self._alike_rounds + 1 if kind == self._last_kind else 1
        self._last_kind = kind
        if not is_ahead and not self._granted:
            choice.costs.add(self.load, cost, is_settled=self._alike_rounds > 1)
        self._awaited_rounds = self._awaited_rounds + 1 if is_ahead else 0
        # Many requests that begin to draft ahead together first wait for each other's steps.
        is_settled = not is_ahead or self.load == 1 or self._awaited_rounds > 2
        if self._draft_ahead == "auto" and is_settled:
            self._compare_ways(choice, proposed, cost.seconds, is_ahead)
        # Rounds that try what was not chosen are not what the prediction is of.
        is_chosen = is_ahead == bool(choice.way.outcomes) and (proposed > 0) == (choice.tokens > 0)
        if is_chosen and cost.is_uniform and not cost.was_late:
            choice.count(proposed, cost.seconds)

    def _compare_ways(self, choice: Choice, proposed: int, seconds: float, is_ahead: bool) -> None:
        """Count what a round with a proposal made beside what was predicted of its way."""
        expected, tokens = choice.expected, choice.compared
        if len(expected) <= max(tokens, proposed):
            return
        if is_ahead:
            speed = choice.ahead.speed(choice.costs, choice.load, expected[: tokens + 1], self._granted)
        elif proposed and not self._granted:
            speed = expected[proposed] / choice.plain.seconds[proposed]
        else:
            return
        calibration = choice.ahead.calibration(is_ahead=is_ahead)
        calibration.add(choice.load, expected[proposed], speed * seconds)

    def end(self) -> None:
        """The request has ended, or its first round has."""
        self._controller.beginning -= self._is_beginning
        self._is_beginning = False

    def _chosen(self, choice: Choice, shared: int) -> int:
        may_begin = choice.tokens > 0 and self._controller.beginning <= BURST
        if not shared or (self._rounds == 1 and not may_begin):
            return 0
        if self._rounds % WINDOW == 0:
            self._own_tokens = self._refined(choice)
        return shared if self._own_tokens is None else min(self._own_tokens, self.max_tokens)

    def _refined(self, choice: Choice) -> int | None:
        """The best length for the request's own acceptance, where it is clearly better than the shared one."""
        if not choice.tokens_per_second:
            return None
        if self._own_tokens == 0:
            self._acceptance.forget()
        speeds = choice.way.speeds(expected_tokens(choice.rates, self._acceptance.scale))
        best = max(range(len(speeds)), key=speeds.__getitem__)
        return best if speeds[best] > HYSTERESIS * HYSTERESIS * speeds[choice.tokens] else None


class _Service(NamedTuple):
    """The report of a service about itself."""

    profile: StepProfile = NO_PROFILE
    round_trip_seconds: float = 0.0
    """Round trip of its health checks."""


class SpeculationController:
    """Shared by all requests: the cost of rounds by target, acceptance by kind of request, one choice by load."""

    def __init__(self) -> None:
        self._services: dict[str, _Service] = {}
        """By address of a target or name of a draft."""
        self._costs: dict[tuple[str, str, str, bool], CostModel] = {}
        """By target, draft, rule, and whether the target leads when it is alone."""
        self._gains: dict[RequestKind, AcceptanceModel] = {}
        self._ahead: dict[tuple[str, RequestKind], AheadModel] = {}
        self._choices: dict[tuple[str, RequestKind, int, int, bool, DraftAhead, bool], Choice] = {}
        self.beginning = 0
        """Requests in their first round."""

    def introduce(self, service: str, model: ModelInfo | None, round_trip_seconds: float | None) -> None:
        """Tell what a service reports of itself, before a request that uses it. A newer profile starts its costs anew.

        Args:
            service: Address of a target, or name of a draft's model.
            model: What it serves, with the profile of its steps.
            round_trip_seconds: Of its health checks.
        """
        if model is None:
            return
        known = self._services.get(service)
        way = round_trip_seconds or 0.0
        if known is None or model.step_profile.version > known.profile.version:
            self._services[service] = _Service(model.step_profile, way)
            for key in [key for key in self._costs if service in key[:2]]:
                del self._costs[key]
            for choice_key in [key for key in self._choices if service in (key[0], key[1].draft)]:
                del self._choices[choice_key]
        elif way != known.round_trip_seconds:
            self._services[service] = known._replace(round_trip_seconds=way)
            for key, costs in self._costs.items():
                costs.trips = tuple(
                    self._services.get(name, _Service()).round_trip_seconds for name in key[:2]
                )

    def request(
        self,
        kind: RequestKind,
        max_tokens: int,
        *,
        is_adaptive: bool = True,
        draft_ahead: DraftAhead = "off",
        leads: bool = False,
    ) -> RequestSpeculation:
        """A request begins.

        Args:
            kind: Whose acceptance it shares.
            max_tokens: Tokens of its longest proposal.
            is_adaptive: Whether measurements may change how much it proposes; not under a fixed policy.
            draft_ahead: How far its rounds draft ahead.
            leads: True if the target, left alone, begins the next rounds before it is asked.
        """
        return RequestSpeculation(self, kind, max_tokens, is_adaptive, draft_ahead, leads)

    def costs(self, target: str, kind: RequestKind, *, leads: bool = False) -> CostModel:
        """The cost model of a target with a draft under a rule. One without a profile begins like another one."""
        key = target, kind.draft, kind.rule, leads
        if key not in self._costs:
            alike = [
                model for other, model in self._costs.items() if other[1] == kind.draft and model.is_known
            ]
            known = alike[-1] if alike else None
            services = self._services.get(target, _Service()), self._services.get(kind.draft, _Service())
            of_target, of_draft = (service.profile for service in services)
            self._costs[key] = CostModel(
                known.target.copy()
                if known and not of_target.seconds
                else StepCosts(of_target, TARGET_COMMON),
                known.draft.copy() if known and not of_draft.seconds else StepCosts(of_draft),
                services[0].round_trip_seconds,
                services[1].round_trip_seconds,
                leads,
                leads and kind.rule in _DECIDED_BY_TOKENS,
            )
        return self._costs[key]

    def gains(self, kind: RequestKind) -> AcceptanceModel:
        """Acceptance of a kind. A new temperature range begins with the first rate of the nearest one."""
        if kind not in self._gains:
            alike = [other for other in self._gains if other[:2] == kind[:2]]
            nearest = min(
                alike, key=lambda other: abs(other.temperature_range - kind.temperature_range), default=None
            )
            first_rate = FIRST_RATE if nearest is None else self._gains[nearest].rates(1)[0]
            self._gains[kind] = AcceptanceModel(first_rate)
        return self._gains[kind]

    def choice(
        self,
        target: str,
        kind: RequestKind,
        load: int,
        max_tokens: int,
        *,
        is_adaptive: bool = True,
        draft_ahead: DraftAhead = "off",
        leads: bool = False,
    ) -> Choice:
        """The decision for a kind of request at a load."""
        key = target, kind, load_class(load), max_tokens, is_adaptive, draft_ahead, leads
        if key not in self._choices:
            self._choices[key] = Choice(
                self.costs(target, kind, leads=leads),
                self.gains(kind),
                self._ahead_model(target, kind),
                load,
                range(max_tokens + 1) if is_adaptive else (max_tokens,),
                outcome_choices(draft_ahead),
            )
        return self._choices[key]

    def _ahead_model(self, target: str, kind: RequestKind) -> AheadModel:
        if (target, kind) not in self._ahead:
            alike = [
                model
                for (other, known), model in self._ahead.items()
                if other == target and known.draft == kind.draft
            ]
            self._ahead[target, kind] = AheadModel(alike[-1] if alike else None)
        return self._ahead[target, kind]

    def choose_rule(self, names: Sequence[str], draft: str, temperature: float, load: int) -> str:
        """The rule with the highest predicted tokens per second at the nearest load so far.

        One of few proposals is predicted by its optimistic acceptance, and so is tried.
        """
        return max(names, key=lambda name: self._hope(request_kind(draft, name, temperature), load))

    def _hope(self, kind: RequestKind, load: int) -> float:
        """Expected tokens per second with the acceptance that the rule may have at best."""
        known = [
            (key, choice)
            for key, choice in self._choices.items()
            if key[1].draft == kind.draft and choice.tokens_per_second
        ]
        if not known:
            return expected_tokens(self.gains(kind).rates(1, 4.0 * OPTIMISM))[-1]
        key, nearest = min(known, key=lambda each: abs(each[1].load - load))
        expected = expected_tokens(self.gains(kind).rates(nearest.max_tokens, 4.0 * OPTIMISM))
        # Rounds of another rule may cost more: only some let the target lead while it drafts
        if key[1].rule != kind.rule:
            target, leads = key[0], key[-1]
            costs, ahead = self.costs(target, kind, leads=leads), self._ahead_model(target, kind)
            nearest = nearest.of_other(costs, self.gains(kind), ahead)
        return max(nearest.way.speeds(expected))

    def decisions(self) -> Iterator[SpeculationDecision]:
        """Decisions for each target, kind and load seen so far."""
        for (target, kind, *_), choice in self._choices.items():
            costs, load = choice.costs, choice.load
            yield SpeculationDecision(
                target,
                kind.draft,
                kind.rule,
                temperature_words(kind.temperature_range),
                load,
                choice.tokens,
                choice.compared if choice.tokens_per_second else 0,
                choice.gain,
                choice.predicted_seconds,
                choice.measured_seconds,
                tuple(choice.way.seconds),
                tuple(choice.rates),
                costs.draft_seconds(load),
                costs.rest_seconds(load, choice.max_tokens),
                choice.way.outcomes,
            )
