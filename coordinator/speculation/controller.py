"""How many tokens each round proposes, predicted from the measurements of all requests.

Pure: no clock and no I/O. The K of a round, possibly 0, is the one with the highest expected tokens per second at the
current load:

    argmax over K of (1 + E[accepted(K)]) / (K * draft(load) + verify(load, K + 1) + rest(load, K))

TurboSpec (Liu et al. 2024, arXiv 2406.14066) calls the numerator over the denominator goodput; vLLM's dynamic
speculation chooses K by it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from coordinator.speculation.ahead import AheadChoice, BranchCosts, DraftAhead, OutcomeHits, RequestAhead
from coordinator.speculation.choice import Choice, load_class
from coordinator.speculation.cost_model import CostModel
from coordinator.speculation.gain_model import (
    FIRST_RATE,
    AcceptanceModel,
)
from coordinator.speculation.kinds import RequestKind, request_kind, temperature_words
from coordinator.speculation.request import RequestSpeculation
from tandem.speculation_state import SpeculationDecision

KNOWN_PROPOSALS = 40
"""After so many proposals a rule's acceptance is known well enough to compare it with others."""
MAX_FIRST_RULE_CHOICES = 24
"""Requests of a coordinator that may try rules with fewer proposals."""
RULE_TRIAL_REQUESTS = 64
"""One of so many requests with `auto` gets the rule that was used least, since measurements get old."""


class SpeculationController:
    """Shared by all requests: the cost of rounds by target, acceptance by kind of request, one choice by load."""

    def __init__(self) -> None:
        self._costs: dict[tuple[str, str, bool], CostModel] = {}
        """By target, rule, and whether rounds draft ahead."""
        self._gains: dict[RequestKind, AcceptanceModel] = {}
        self._choices: dict[tuple[str, RequestKind, int, int, bool], Choice] = {}
        self._ahead_choices: dict[tuple[str, RequestKind, int], AheadChoice] = {}
        self._outcome_hits: defaultdict[RequestKind, OutcomeHits] = defaultdict(OutcomeHits)
        self._branch_costs = BranchCosts()
        self._rule_choices = 0
        self.beginning = 0
        """Requests in their first round."""

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
            is_adaptive: Whether measurements may change how much it proposes. They must not where a seed promises a
                text that depends on where rounds begin.
            draft_ahead: How far its rounds draft ahead.
        """
        ahead = RequestAhead(draft_ahead, self._outcome_hits[kind], self._branch_costs)
        return RequestSpeculation(self, kind, max_tokens, is_adaptive, ahead)

    def costs(self, target: str, rule: str, drafts_ahead: bool = False) -> CostModel:
        """The cost model of a target under a rule. A new target begins with what is known of another."""
        key = target, rule, drafts_ahead
        found = self._costs.get(key)
        if found is None:
            alike = [other for other, model in self._costs.items() if other[1] == rule and model.is_known]
            # Best the same target without drafting ahead, or with it; then the one that was seen last.
            nearest = max(alike, key=lambda other: other[0] == target, default=None)
            found = self._costs[key] = CostModel() if nearest is None else self._costs[nearest].copy()
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
            costs = self.costs(target, kind.rule, drafts_ahead)
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
        """The rule with the highest predicted tokens per second; a rule that was hardly used comes first.

        Args:
            names: Rules to choose from, the first preferred.
            draft: Name of the draft's model.
            temperature: Of the request.
            load: Sequences that share a target.
        """
        kinds = {name: request_kind(draft, name, temperature) for name in names}
        self._rule_choices += 1
        proposals = {name: self.gains(kind).proposals for name, kind in kinds.items()}
        if self._rule_choices % RULE_TRIAL_REQUESTS == 0:
            return min(names, key=proposals.__getitem__)
        unknown = next((name for name in names if proposals[name] < KNOWN_PROPOSALS), None)
        if unknown is not None and self._rule_choices <= MAX_FIRST_RULE_CHOICES:
            return unknown
        return max(names, key=lambda name: self._tokens_per_second(kinds[name], load))

    def _tokens_per_second(self, kind: RequestKind, load: int) -> float:
        """Prediction for the best length, at the nearest load so far; 0 where there is none."""
        known = [
            choice
            for (_, other, *_), choice in self._choices.items()
            if other == kind and choice.tokens_per_second
        ]
        if not known:
            return 0.0
        return max(min(known, key=lambda choice: abs(choice.load - load)).tokens_per_second)

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
                choice.tokens,
                choice.best_drafting,
                choice.gain,
                choice.predicted_seconds,
                choice.measured_seconds,
                tuple(choice.round_seconds),
                tuple(choice.rates),
                costs.draft_seconds(load),
                costs.rest_seconds(load, choice.max_tokens),
                choice.ahead_outcomes if drafts_ahead else None,
            )
