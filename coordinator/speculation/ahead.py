"""Drafting ahead of verifications: what it is predicted to gain, and how long to wait for what it made.

Pure: no clock and no I/O. A hit costs a verification, or the draft's steps where these take longer; a miss costs a
whole round. What the prediction leaves out, one factor learns: draft and target may share a machine, where the draft's
steps slow down the very verification that they hide behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from coordinator.speculation.costs import SURPRISE, CostModel, load_class, nearest
from coordinator.speculation.gains import MEMORY, WINDOW
from coordinator.stats.speculation import MovingAverage
from tandem.types import MAX_AHEAD_TOKENS, AheadBudget

DraftAhead = Literal["auto", "off"] | int
"""auto: as far as it pays; off: not at all; a number: always for so many outcomes."""
OUTCOMES = (1, 2, 4, 8, 16)
"""Numbers of outcomes to choose from."""
_FIRST_HITS = ((1, 0.3), (2, 0.42), (4, 0.52), (8, 0.64), (16, 0.74), (32, 0.82), (64, 0.88))
"""Share of outcomes that came among the first so many, before anything was measured: what a 2.6 M draft of a 25.7 M
target reached."""


def outcome_choices(option: DraftAhead) -> tuple[int, ...]:
    """The numbers of outcomes that rounds may draft ahead for; 0: not ahead."""
    if isinstance(option, int):
        return (option,)
    return (0, *OUTCOMES) if option == "auto" else (0,)


def max_budget(option: DraftAhead, max_tokens: int) -> AheadBudget | None:
    """The most that any round will grant; None for nothing."""
    most = outcome_choices(option)[-1]
    return AheadBudget(most, min(max_tokens, MAX_AHEAD_TOKENS)) if most else None


class OutcomeHits:
    """Frequency with which each place among the outcomes came. Places that were not drafted for are estimated."""

    def __init__(self) -> None:
        self._weight = float(WINDOW)
        self._hits = [0.0] * _FIRST_HITS[-1][0]
        before = (0, 0.0)
        for count, share in _FIRST_HITS:
            for rank in range(before[0], count):
                self._hits[rank] = self._weight * (share - before[1]) / (count - before[0])
            before = count, share

    def add(self, rank: int | None, outcomes: int) -> None:
        """Count a round: the place of the outcome that came, None for a miss, among so many."""
        hits, weight = self._hits, self._weight
        for other in range(outcomes, len(hits)):
            hits[other] += hits[other] / weight  # nothing is known of these: their share stays
        if rank is not None and rank < len(hits):
            hits[rank] += 1.0
        self._weight += 1.0
        if self._weight > 2 * MEMORY:
            self._weight /= 2
            self._hits = [count / 2 for count in hits]

    def share(self, outcomes: int) -> float:
        """Share of rounds whose outcome is among the first `outcomes`."""
        return min(sum(self._hits[:outcomes]) / self._weight, 1.0)


class Calibration:
    """Tokens that rounds make, by what was predicted for as long as they took. By load class."""

    def __init__(self, like: Calibration | None = None) -> None:
        self._made: dict[int, list[float]] = {}
        """Made, and predicted."""
        if like is not None:
            self._made = {load: [made / predicted, 1.0] for load, (made, predicted) in like._made.items()}

    def factor(self, load: int) -> float:
        """The ratio at the nearest load; 1 before any round."""
        if not self._made:
            return 1.0
        made, predicted = nearest(self._made, load)
        return made / predicted

    def add(self, load: int, tokens: float, predicted: float) -> None:
        """Count a round of one of `load` requests: its expected tokens, and those predicted for as long as it took."""
        factor = self.factor(load)
        known = self._made.setdefault(load_class(load), [load * tokens, load * tokens / factor])
        keep = 1.0 - 1.0 / (WINDOW * load)
        known[0] = keep * known[0] + tokens
        known[1] = keep * known[1] + min(predicted, SURPRISE * tokens / factor)  # a pause is no cost

    def doubt(self, load: int, tokens: float) -> None:
        """Let what is known at a load weigh as little as one round: it was long ago."""
        known = self._made.get(load_class(load))
        if known is not None:
            share = min(load * tokens / known[0], 1.0)
            known[:] = [share * each for each in known]


class AheadModel:
    """Predicts rounds that draft ahead, for one kind of request on one target."""

    def __init__(self, like: AheadModel | None = None) -> None:
        """
        Args:
            like: The model of other requests with the same target and draft, whose factors are where this one begins.
        """
        self.hits = OutcomeHits()
        self.question = MovingAverage()
        """Seconds of a question after a miss, beside the steps that answer it."""
        self._ahead: Calibration = Calibration(like._ahead if like else None)
        self._plain: Calibration = Calibration(like._plain if like else None)

    def factor(self, load: int) -> float:
        """Tokens per second of rounds that draft ahead by what was predicted, each beside the same of rounds that do
        not: both change alike when other work comes to the machine."""
        return self._ahead.factor(load) / self._plain.factor(load)

    def calibration(self, *, is_ahead: bool) -> Calibration:
        """Tokens made by tokens predicted without the factor: of rounds that draft ahead, or of others."""
        return self._ahead if is_ahead else self._plain

    def speed(self, costs: CostModel, load: int, expected: Sequence[float], outcomes: int) -> float:
        """Predicted tokens per second, without the factor.

        Args:
            costs: Of rounds that do not draft ahead.
            expected: Expected tokens of a round with a proposal of 0, 1, ... tokens; rounds propose the most of them.
            outcomes: How many the draft drafts for. Each is one more token in its steps.
        """
        tokens = len(expected) - 1
        verify, draft = costs.verify_seconds(load, tokens), costs.draft_seconds(load)
        step = max(costs.draft.seconds(load, load * outcomes), 1e-9)
        share = self.hits.share(outcomes)
        miss = verify + costs.rest_seconds(load, tokens) + tokens * draft
        rest = costs.asked_seconds(load, 0)
        if costs.leads_with_proposals:  # the draft learns the outcome when the next verification has begun
            draft, rest = draft + rest, 0.0
        # As many tokens as the verification leaves time for, or all of them.
        hidden = min(max(int((verify - draft) / step), 1), tokens)

        def speed_at(depth: int) -> float:
            hit = max(verify, draft + depth * step) + rest
            made = share * expected[depth] + (1.0 - share) * expected[tokens]
            return made / (share * hit + (1.0 - share) * miss)

        return max(speed_at(hidden), speed_at(tokens))


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
        wait_seconds: Of asking the draft, beside its steps: messages, and the step of branches that it is at.
        tokens_per_second: What rounds make now.
    """

    def advantage(count: int) -> float:
        waited = wait_seconds + count * draft_seconds if count else 0.0
        return expected[count] - tokens_per_second * (waited + verify_seconds[count])

    return max(counts, key=advantage)
