"""The choice to draft ahead of verifications, and for how many outcomes, by measurements of rounds with and without it.

Pure: no clock and no I/O. How many outcomes are worth drafting for is predicted from what the draft's steps take and
from how often each place among the outcomes was the one that came. Whether any are is measured, because drafting ahead
may slow down the very target that it hides behind, where both share a machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from coordinator.stats.speculation import MovingAverage
from tandem.types import MAX_AHEAD_TOKENS, AheadBudget

if TYPE_CHECKING:
    from coordinator.speculation.controller import Choice

DraftAhead = Literal["auto", "off"] | int
"""auto: as far as it pays; off: not at all; a number: always for so many outcomes."""
BRANCHES = (1, 2, 4, 8, 16)
"""Numbers of outcomes to choose from."""
TRIAL_ROUNDS = 12
"""Rounds of each request in a trial of the other way."""
TRIAL_SHARE = 0.02
"""Share of all rounds that trials take, the first excepted."""
FIRST_TRIAL_ROUNDS = 32
"""Rounds of each request before the first trial."""
MAX_BACKOFF = 16
"""Trials that change nothing become rarer, down to this share of the rate above."""
ADVANTAGE = 1.02
"""Times the tokens per second by which the other way must be better."""
MEMORY_ROUNDS = 96.0
"""Rounds that the speed of either way averages over."""
_FIRST_HITS = ((1, 0.3), (2, 0.42), (4, 0.52), (8, 0.64), (16, 0.74), (32, 0.82), (64, 0.88))
"""Share of outcomes that came among the first so many, before anything was measured: what a 2.6 M draft of a 25.7 M
target reached."""
_FIRST_HITS_WEIGHT = 24.0
"""The table above weighs as much as so many rounds."""
_MAX_HITS_WEIGHT = 1000.0
_ROWS_SHARE = 0.1 / 8.0
"""Share of a step of one row that each further row is taken to cost before any step of branches was measured."""
_STEP_SHARE = 0.2
"""Weight of the newest step in the moving average of what steps of so many branches take."""


class OutcomeHits:
    """Frequency with which each place among the outcomes came. Places that were not drafted for are estimated."""

    def __init__(self) -> None:
        self._weight = _FIRST_HITS_WEIGHT
        self._hits = [0.0] * _FIRST_HITS[-1][0]
        before = (0, 0.0)
        for count, share in _FIRST_HITS:
            for rank in range(before[0], count):
                self._hits[rank] = self._weight * (share - before[1]) / (count - before[0])
            before = count, share

    def add(self, rank: int | None, branch_count: int) -> None:
        """Count a round: the place of the outcome that came, None for a miss, among so many."""
        hits, weight = self._hits, self._weight
        for other in range(branch_count, len(hits)):
            hits[other] += hits[other] / weight  # nothing is known of these: their share stays
        if rank is not None and rank < len(hits):
            hits[rank] += 1.0
        self._weight += 1.0
        if self._weight > _MAX_HITS_WEIGHT:
            self._weight /= 2
            self._hits = [count / 2 for count in hits]

    def share(self, branch_count: int) -> float:
        """Share of rounds whose outcome is among the first `branch_count`."""
        return min(sum(self._hits[:branch_count]) / self._weight, 1.0)


class BranchCosts:
    """Seconds of a step of so many branches, and of a question after a miss."""

    def __init__(self) -> None:
        self._measured: dict[int, float] = {}
        self.question = MovingAverage()
        """Seconds of a question after a miss, beside the steps that answer it."""

    def add(self, branch_count: int, seconds: float) -> None:
        """Count a step."""
        mean = self._measured.get(branch_count)
        self._measured[branch_count] = seconds if mean is None else mean + _STEP_SHARE * (seconds - mean)

    def seconds(self, branch_count: int, one_row: float) -> float:
        """Predicted, from a step of one row and from the nearest number of branches that was measured."""
        expected = one_row * (1.0 + _ROWS_SHARE * (branch_count - 1))
        if not self._measured:
            return expected
        nearest = min(self._measured, key=lambda count: abs(count - branch_count))
        return expected * self._measured[nearest] / (one_row * (1.0 + _ROWS_SHARE * (nearest - 1)))


def branches(
    hits: OutcomeHits,
    costs: BranchCosts,
    *,
    tokens: int,
    expected: Sequence[float],
    verify_seconds: float,
    draft_seconds: float,
    rest_seconds: float,
) -> int:
    """The number of outcomes with the highest predicted tokens per second.

    While one verification runs, the draft reads the proposal in one step and then makes a step of all branches for each
    token. A hit costs a verification, or the draft's steps where these take longer: a round waits for as many tokens as
    are worth it. A miss costs a whole round.

    Args:
        hits: How often which outcome comes.
        costs: What steps of branches take.
        tokens: Tokens of a proposal.
        expected: Expected tokens of a round with a proposal of 0, 1, ..., `tokens` tokens.
        verify_seconds: Of a verification.
        draft_seconds: Of a draft step of one row.
        rest_seconds: Of a round, beside the steps.
    """

    def speed(count: int) -> float:
        step = max(costs.seconds(count, draft_seconds), 1e-9)
        share = hits.share(count)
        miss = verify_seconds + rest_seconds + tokens * draft_seconds

        def speed_at(depth: int) -> float:
            hit = max(verify_seconds, draft_seconds + depth * step) + rest_seconds / 2
            made = share * expected[depth] + (1.0 - share) * expected[tokens]
            return made / (share * hit + (1.0 - share) * miss)

        return max(map(speed_at, range(1, tokens + 1)))

    return max(BRANCHES, key=speed)


class AheadChoice:
    """The choice between rounds with and without drafting ahead, for requests of one kind at one load.

    The way that makes more tokens per second is used, and a small share of the rounds tries the other one.
    """

    def __init__(self, load: int) -> None:
        """
        Args:
            load: Sequences that share the target.
        """
        self._load = load
        self.is_on = False
        """The better way, as far as is known. It has to be shown first that drafting ahead pays: where draft and target
        share a machine, it does not."""
        self._speeds = {True: [0.0, 0.0], False: [0.0, 0.0]}
        """Tokens and seconds of the rounds with and without it."""
        self._rounds = 0
        self._trial_rounds = 0
        self._next_trial = FIRST_TRIAL_ROUNDS * load
        self._backoff = 1
        self._in_trial = False

    @property
    def gain(self) -> float:
        """Tokens per second with drafting ahead over those without; 0: not known."""
        on, off = self._speed(True), self._speed(False)
        return on / off if on and off else 0.0

    def begin_round(self) -> bool:
        """True if the round that begins is to draft ahead."""
        self._rounds += 1
        if self._trial_rounds == 0 and self._in_trial:
            self._end_trial()
        if self._trial_rounds == 0 and self._rounds >= self._next_trial:
            self._in_trial = True
            self._trial_rounds = TRIAL_ROUNDS * self._load
        if self._trial_rounds:
            self._trial_rounds -= 1
            return not self.is_on
        return self.is_on

    def end_round(self, *, was_on: bool, tokens: float, seconds: float) -> None:
        """Count a round of one request: expected tokens and the time it took."""
        entry = self._speeds[was_on]
        limit = MEMORY_ROUNDS * self._load
        keep = 1.0 - 1.0 / limit
        entry[0] = keep * entry[0] + tokens
        entry[1] = keep * entry[1] + seconds

    def _speed(self, is_on: bool) -> float:
        tokens, seconds = self._speeds[is_on]
        return tokens / seconds if seconds else 0.0

    def _end_trial(self) -> None:
        self._in_trial = False
        is_better = self._speed(not self.is_on) > ADVANTAGE * self._speed(self.is_on)
        if is_better:
            self.is_on = not self.is_on
        self._backoff = 1 if is_better else min(2 * self._backoff, MAX_BACKOFF)
        pause = TRIAL_ROUNDS * self._load / TRIAL_SHARE / 2 * self._backoff
        self._next_trial = self._rounds + int(pause)


class RequestAhead:
    """One request's part: how far each of its rounds drafts ahead."""

    def __init__(self, option: DraftAhead, hits: OutcomeHits, costs: BranchCosts) -> None:
        """
        Args:
            option: The configuration.
            hits: Shared by requests of one kind.
            costs: Shared by all requests.
        """
        self._option = option
        self._hits = hits
        self._costs = costs
        self._branch_count = 0
        self._was_on = self._is_on = False

    @property
    def is_on(self) -> bool:
        """True if the round in progress drafts ahead."""
        return self._is_on

    def max_budget(self, max_tokens: int) -> AheadBudget | None:
        """The most that any round will grant; None for nothing."""
        if self._option == "off":
            return None
        branch_count = BRANCHES[-1] if self._option == "auto" else self._option
        return AheadBudget(branch_count, min(max_tokens, MAX_AHEAD_TOKENS))

    def begin_round(self, choice: AheadChoice) -> bool:
        """True if the round that begins is to draft ahead."""
        self._was_on = self._is_on
        self._is_on = self._option != "off" and (self._option != "auto" or choice.begin_round())
        return self._is_on

    def budget(self, tokens: int, choice: Choice) -> AheadBudget | None:
        """Budget of the round in progress.

        Args:
            tokens: Tokens of the next round's proposal.
            choice: Predictions at the load of this round.
        """
        if not self._is_on or tokens <= 0:
            return None
        if self._option == "auto":
            self._branch_count = self._best(tokens, choice)
        elif isinstance(self._option, int):
            self._branch_count = self._option
        choice.ahead_outcomes = self._branch_count
        return AheadBudget(self._branch_count, min(tokens, MAX_AHEAD_TOKENS))

    def came(self, rank: int | None) -> None:
        """An outcome has come that was awaited: its place, None if it was not drafted for."""
        self._hits.add(rank, self._branch_count)

    def stepped(self, branch_count: int, seconds: float) -> None:
        """The draft has made a step of so many branches."""
        self._costs.add(branch_count, seconds)

    def asked(self, seconds: float) -> None:
        """The draft was asked after a miss, which took so long beside its steps."""
        self._costs.question.add(max(seconds, 0.0))

    @property
    def question_seconds(self) -> float | None:
        """Seconds of a question after a miss, beside the draft's steps; None before the first."""
        return self._costs.question.value

    def end_round(self, choice: AheadChoice, tokens: float, seconds: float) -> None:
        """Count a round, unless it was the first of its way: that one is half of the other's."""
        if self._option == "auto" and self._is_on == self._was_on:
            choice.end_round(was_on=self._is_on, tokens=tokens, seconds=seconds)

    def _best(self, tokens: int, choice: Choice) -> int:
        costs, load = choice.costs, choice.load
        if len(choice.expected) <= tokens or not costs.draft.is_known:
            return BRANCHES[-2]
        return branches(
            self._hits,
            self._costs,
            tokens=tokens,
            expected=choice.expected,
            # The draft drafts for all sequences of the target in the same steps.
            verify_seconds=costs.verify_seconds(load, tokens),
            draft_seconds=costs.draft_seconds(load),
            rest_seconds=costs.rest_seconds(load, tokens),
        )


class Unfinished(NamedTuple):
    """A continuation that the draft is still drafting."""

    ready: int
    """Tokens that are there."""
    max_tokens: int
    """Tokens that it will have."""
    due_seconds: float
    """Seconds until the next token is expected."""
    step_seconds: float
    """Seconds from one token to the next."""


def tokens_after_hit(expected: Sequence[float], unfinished: Unfinished, *, tokens_per_second: float) -> int:
    """How many tokens to wait for when the draft is still drafting the continuation of the outcome that came.

    Args:
        expected: Expected tokens of a round with a proposal of 0, 1, ... tokens, as many as it may have.
        unfinished: The continuation.
        tokens_per_second: What rounds make now.
    """
    ready, _, due_seconds, step_seconds = unfinished

    def advantage(count: int) -> float:
        waited = due_seconds + (count - ready - 1) * step_seconds if count > ready else 0.0
        return expected[count] - tokens_per_second * waited

    return max(range(ready, len(expected)), key=advantage, default=ready)


def tokens_after_miss(
    expected: Sequence[float],
    verify_seconds: Sequence[float],
    *,
    counts: Iterable[int],
    draft_seconds: float,
    wait_seconds: float,
    tokens_per_second: float,
) -> int:
    """How many tokens to ask for when another outcome came than those that were drafted for; 0: the target goes on.

    Args:
        expected: Expected tokens of a round with a proposal of 0, 1, ... tokens.
        verify_seconds: Of a verification of as many.
        counts: Numbers of tokens to choose from.
        draft_seconds: Of a draft step.
        wait_seconds: Of asking the draft, beside its steps: messages, and the step of branches that it is at.
        tokens_per_second: What rounds make now.
    """

    def advantage(count: int) -> float:
        waited = wait_seconds + count * draft_seconds if count else 0.0
        return expected[count] - tokens_per_second * (waited + verify_seconds[count])

    return max(counts, key=advantage)
