"""One request's part in the controller: its rounds, and where its own acceptance differs from that of all."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from coordinator.speculation.ahead import AheadChoice, RequestAhead
from coordinator.speculation.choice import TRIAL_ROUNDS, Choice
from coordinator.speculation.gain_model import RequestAcceptance, expected_tokens
from coordinator.speculation.kinds import RequestKind
from coordinator.speculation.waiting import Unfinished, tokens_after_hit, tokens_after_miss
from coordinator.stats.rounds import RoundResult
from tandem.types import AheadBudget

if TYPE_CHECKING:
    from coordinator.speculation.controller import SpeculationController


BURST = 4
"""Requests that may begin at once with a draft stream. When more arrive at once, the later ones open no draft stream
until the load is known: a draft that is not needed would read their prompts in vain."""
REFINING_ROUNDS = 8
"""A request compares its own acceptance with that of all every so many rounds."""
OWN_ADVANTAGE = 1.1
"""Factor in tokens per second by which another length must be better for one request than the shared choice."""


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
        "_is_in_trial",
        "_load",
        "_own_tokens",
        "_rounds",
        "_tokens",
        "_trial_rounds",
        "_trial_tokens",
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
        self._trial_rounds = 0
        self._trial_tokens = 0
        self._has_begun = False
        self._is_in_trial = False
        controller.beginning += 1

    @property
    def choice(self) -> Choice | None:
        """Choice at the load of the round in progress; None before the first round."""
        return self._choice

    @property
    def is_trial(self) -> bool:
        """True if the round in progress tries a length other than the best one."""
        return self._is_in_trial or (self._choice is not None and self._choice.trial_rounds > 0)

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
        if self.is_adaptive:
            self._tokens = self._chosen(choice)
        else:
            choice.follow_round()
            self._tokens = self.max_tokens
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
            [costs.verify_seconds(load, load * (tokens + 1)) for tokens in range(count + 1)],
            counts=range(count + 1) if self.is_adaptive else (0, count),
            draft_seconds=costs.draft_seconds(load),
            wait_seconds=wait_seconds,
            tokens_per_second=max(choice.tokens_per_second, default=0.0),
        )

    def asked_after_miss(self, tokens: int, seconds: float) -> None:
        """The draft has answered the question after a miss with so many tokens, after so long."""
        choice = self._choice
        if choice is not None and choice.costs.knows_draft:
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
            self._acceptance.add(proposed, result.accepted, choice.rate_sums)
            if self._is_in_trial:
                choice.tried(proposed, result.accepted)
        tokens = choice.expected[proposed] if len(choice.expected) > proposed else 1.0 + result.accepted
        self.ahead.end_round(self._ahead_choice, tokens, cost.seconds)
        is_uniform = cost.is_uniform
        choice.costs.add(self._load, cost, is_uniform)
        if is_uniform and not cost.was_late:
            choice.count(proposed, cost.seconds)

    def end(self) -> None:
        """The request has ended."""
        self._leave_beginning()

    def _leave_beginning(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._controller.beginning -= 1

    def _chosen(self, choice: Choice) -> int:
        if self._rounds == 1 and self._controller.beginning > BURST:
            return 0
        tokens = choice.begin_round()
        self._is_in_trial = self._trial_rounds > 0
        if self._is_in_trial:
            self._trial_rounds -= 1
            return self._trial_tokens
        if choice.has_trial_of_one and self._rounds > 1:
            self._trial_tokens, self._trial_rounds = choice.begin_trial_of_one(), TRIAL_ROUNDS
            return self._trial_tokens
        if choice.trial_rounds or not tokens:
            return tokens
        if self._rounds % REFINING_ROUNDS == 0:
            self._own_tokens = self._refined(choice)
        return tokens if self._own_tokens is None else min(self._own_tokens, self.max_tokens)

    def _refined(self, choice: Choice) -> int | None:
        """The best length for the request's own acceptance, where it is clearly better than the shared one."""
        seconds = choice.round_seconds
        if not seconds:
            return None
        if self._own_tokens == 0:
            self._acceptance.forget()
        expected = expected_tokens(choice.rates, self._acceptance.scale)
        speeds = [tokens / max(second, 1e-9) for tokens, second in zip(expected, seconds, strict=True)]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        return best if speeds[best] > OWN_ADVANTAGE * speeds[choice.tokens] else None
