"""The proposal length for one kind of request at one load: the best by prediction, with a few rounds to try others."""

from __future__ import annotations

import math
from itertools import accumulate

from coordinator.speculation.cost_model import CostModel
from coordinator.speculation.gain_model import AcceptanceModel, expected_tokens
from coordinator.speculation.linear_cost import size_class

MANY = 8
"""From so many requests at once, an unmeasured load begins with the target alone. vLLM's `disable_by_batch_size` sets
such a limit by hand; here it applies only until the first rounds are measured."""
ADVANTAGE = 1.03
"""Factor in predicted tokens per second by which another length must be better: less may be noise."""
DRAFT_READING = 1.03
"""Factor in predicted tokens per second by which drafting must beat the target alone, since rounds do not show that the
draft reads prompts too."""
RENEWAL_ROUNDS = 32
"""Rounds of all requests between two predictions."""
FIRST_RENEWAL_ROUNDS = 4
TRIAL_ROUNDS = 3
"""Rounds of each request in a trial. The first one may share steps with sequences that have not begun the trial."""
TRIAL_SHARE = 0.01
"""Share of all rounds, and of their time, that trials may take, except for the first trial at each load."""
FIRST_TRIAL_ROUNDS = 32
"""Rounds of each request before the first trial: where the draft is useless, earlier ones cost more than they find."""
SURPRISED_ROUNDS = 16
"""Rounds of each request between a trial with a surprise and the next one."""
MAX_BACKOFF = 32
"""Trials that change nothing become rarer, down to this share of the rate above."""
MAX_PAUSE_ROUNDS = 1024
"""Rounds of each request between two trials, at most."""
SURPRISE = 2.0
"""A trial that accepts this many times the expected tokens, and one more, is followed by another at once."""
REMEMBERED_PROPOSALS = 32.0
"""Weight limit, in proposals, of acceptance from before a trial: it may have been long ago."""
HOPEFUL = 0.5
"""Optimism about lengths with few measurements: one without any is credited with this share more."""
HOPELESS = 0.7
"""A measured length that is predicted to make less than this share of the tokens is tried a quarter as often."""


class Choice:
    """Follows the rounds of the requests that it decides for."""

    __slots__ = (
        "_backoff",
        "_is_first_look",
        "_next_trial",
        "_renew_in",
        "_renewal_rounds",
        "_rounds",
        "_surprise",
        "_trials",
        "ahead_outcomes",
        "costs",
        "expected",
        "gains",
        "load",
        "max_tokens",
        "measured_seconds",
        "predicted_seconds",
        "rate_sums",
        "rates",
        "round_seconds",
        "tokens",
        "tokens_per_second",
        "trial_rounds",
        "trial_tokens",
        "uncorrected_seconds",
    )

    def __init__(self, costs: CostModel, gains: AcceptanceModel, load: int, max_tokens: int) -> None:
        self.costs = costs
        self.gains = gains
        self.load = load
        self.max_tokens = max_tokens
        """Tokens of the longest proposal."""
        self.ahead_outcomes = 0
        """Outcomes that a round drafted ahead for last; 0: none did yet."""
        self.tokens = 0
        """Length of the best proposal so far."""
        self.rates: list[float] = []
        """Conditional acceptance by position."""
        self.expected: list[float] = []
        """Expected tokens of a round, by proposed tokens."""
        self.rate_sums: list[float] = []
        """Sums of the first 0, 1, ... of them."""
        self.round_seconds: list[float] = []
        """Predicted seconds of a round, by proposed tokens; empty before anything was measured."""
        self.uncorrected_seconds: list[float] = []
        """The uncorrected prediction."""
        self.tokens_per_second: list[float] = []
        """Predicted tokens per second of each request, by proposed tokens."""
        self.trial_tokens = 0
        self.trial_rounds = 0
        """Rounds that are left of a trial in which all requests take part."""
        self.predicted_seconds = 0.0
        self.measured_seconds = 0.0
        """Measured seconds of the rounds that were also predicted."""
        self._rounds = 0
        self._renew_in = 0
        self._renewal_rounds = FIRST_RENEWAL_ROUNDS
        """Rounds until the next prediction; doubled after each, up to `RENEWAL_ROUNDS` or a little more for long
        proposals."""
        self._trials = 0
        self._next_trial = FIRST_TRIAL_ROUNDS * load
        self._backoff = 1
        self._surprise = 0.0
        """Tokens that the last trial accepted beyond the expected number and margin."""
        self._is_first_look = True
        self._begin()

    @property
    def gain(self) -> float:
        """Predicted tokens per second with the best length above 0, over those of the target alone; 0: unknown."""
        best = self.best_drafting
        return self.tokens_per_second[best] / self.tokens_per_second[0] if best else 0.0

    @property
    def best_drafting(self) -> int:
        """The length above 0 with the highest predicted tokens per second; 0: unknown."""
        speeds = self.tokens_per_second
        return max(range(1, len(speeds)), key=speeds.__getitem__, default=0) if speeds else 0

    def _begin(self) -> None:
        if not self.costs.is_known:
            self.tokens = 0 if self.load >= MANY else self.max_tokens
            self._renew_in = FIRST_RENEWAL_ROUNDS
            return
        is_measured = any(self.costs.measured(self.load, count) for count in range(self.max_tokens + 1))
        self._renew()
        if self.load >= MANY and not is_measured:
            self.tokens = 0
            self._renew_in = 2 * self.load

    def begin_round(self) -> int:
        """Number of tokens to propose in the round that begins, unless the request tries a length by itself."""
        self.follow_round()
        if self.trial_rounds:
            self.trial_rounds -= 1
            if not self.trial_rounds:
                self._renew_in = min(self._renew_in, FIRST_RENEWAL_ROUNDS)
            return self.trial_tokens
        if self._rounds >= self._next_trial and self.tokens:
            self._begin_trial(TRIAL_ROUNDS * self.load)
            self.trial_rounds = TRIAL_ROUNDS * self.load
            return self.trial_tokens
        return self.tokens

    def follow_round(self) -> None:
        """Count a round whose length is decided elsewhere."""
        self._rounds += 1
        self._renew_in -= 1
        if self._renew_in <= 0:
            self._renew()

    @property
    def has_trial_of_one(self) -> bool:
        """True if a single request should try a proposal while the others go without.

        For the other requests, a draft would have to read their prompts first. One request shows the acceptance, and
        its steps show the cost of tokens.
        """
        return self._rounds >= self._next_trial and not self.tokens and self.max_tokens > 0

    def begin_trial_of_one(self) -> int:
        """Number of tokens that the trial proposes, in each of `TRIAL_ROUNDS` rounds."""
        self.gains.forget(REMEMBERED_PROPOSALS)
        self.costs.forget_drafting()
        self._surprise = -1.0
        # In the first round the draft reads the prompt. The others' rounds share the steps of this one's proposals.
        self._begin_trial((TRIAL_ROUNDS + 1) * self.load)
        return self.trial_tokens

    def tried(self, proposed: int, accepted: int) -> None:
        """Count a round of a trial of one request."""
        self._surprise += accepted - SURPRISE * (expected_tokens(self.rates[:proposed])[-1] - 1.0)
        if self._surprise > 0.0:
            self._backoff = 1
            self._next_trial = self._rounds + SURPRISED_ROUNDS * self.load

    def count(self, proposed: int, seconds: float) -> None:
        """Count a uniform round at this load."""
        if proposed < len(self.round_seconds):
            self.costs.correct(self.load, proposed, seconds, self.uncorrected_seconds[proposed])
            self.predicted_seconds += self.round_seconds[proposed]
            self.measured_seconds += seconds

    def _begin_trial(self, rounds: int) -> None:
        self.trial_tokens = other = self._candidate()
        pause = rounds * self._dearness(other) / TRIAL_SHARE * self._backoff
        if self._is_hopeless(other):
            pause *= 4
        self._next_trial = self._rounds + int(
            min(pause, max(MAX_PAUSE_ROUNDS * self.load, rounds / TRIAL_SHARE))
        )
        self._backoff = min(2 * self._backoff, MAX_BACKOFF)
        self._trials += 1

    def _dearness(self, other: int) -> float:
        """A round with `other` tokens by one with the best number, in predicted seconds; at least 1."""
        seconds = self.round_seconds
        return max(seconds[other] / max(seconds[self.tokens], 1e-9), 1.0) if seconds else 1.0

    def _candidate(self) -> int:
        """The length that the next trial tries: the most promising other one, or sometimes 0 or the longest.

        While the target works alone, a long proposal shows more about acceptance, and only one request pays for it.
        """
        others = [count for count in range(1, self.max_tokens + 1) if count != self.tokens]
        if self.tokens and (self._trials % 2 == 0 or not others):
            return 0
        if not self.tokens_per_second or (not self.tokens and self._trials % 3 == 2):
            return self.max_tokens
        return max(others, key=self._optimistic)

    def _optimistic(self, count: int) -> float:
        doubt = HOPEFUL / math.sqrt(1.0 + 4.0 * self.costs.measured(self.load, count))
        return self.tokens_per_second[count] * (1.0 + doubt)

    def _is_hopeless(self, other: int) -> bool:
        speeds = self.tokens_per_second
        return (
            bool(speeds)
            and self.costs.measured(self.load, other) > 0.5
            and speeds[other] < HOPELESS * speeds[self.tokens]
        )

    def _renew(self) -> None:
        """Predict again, and change the length where another is clearly better."""
        self._renew_in = self._renewal_rounds
        if not self.costs.is_known:
            return
        self._renewal_rounds = min(2 * self._renewal_rounds, max(RENEWAL_ROUNDS, 4 * self.max_tokens))
        costs, load = self.costs, self.load
        self.rates = self.gains.rates(self.max_tokens)
        self.rate_sums = [0.0, *accumulate(self.rates)]
        lengths = range(self.max_tokens + 1)
        self.uncorrected_seconds = [costs.uncorrected_seconds(load, count) for count in lengths]
        self.round_seconds = [
            seconds * costs.correction(load, count) for count, seconds in enumerate(self.uncorrected_seconds)
        ]
        expected = self.expected = expected_tokens(self.rates)
        speeds = self.tokens_per_second = [
            tokens / max(seconds, 1e-9) for tokens, seconds in zip(expected, self.round_seconds, strict=True)
        ]
        best = max(range(len(speeds)), key=lambda count: speeds[count] / (DRAFT_READING if count else 1.0))
        kept = speeds[self.tokens] / (DRAFT_READING if self.tokens else 1.0)
        found = speeds[best] / (DRAFT_READING if best else 1.0)
        if best != self.tokens and (self._is_first_look or found > ADVANTAGE * kept):
            self.tokens = best
            self._backoff = 1
            self._next_trial = min(self._next_trial, self._rounds + int(TRIAL_ROUNDS * load / TRIAL_SHARE))
        self._is_first_look = False


def load_class(load: int) -> int:
    """The class of a load. Loads of one class share a choice."""
    return size_class(load)
