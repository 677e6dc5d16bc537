"""The event of a round that has ended, and the counts of a request's rounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise
from typing import NamedTuple

from tandem.model.types import (
    MAX_AHEAD_TOKENS,
    AheadBudget,
    AheadStats,
    LeadStats,
    PositionStats,
    SpeculationStats,
    StepCost,
)

PHASES = ("wait", "draft", "verify", "sampling")
"""Parts of a round. It waits for detokenization, the client that reads, and the event loop's other work."""


class RoundTimes(NamedTuple):
    """Moments of a round, in seconds of the performance counter."""

    began: float
    """The acceptance rule decided the previous round; the rounds of a request leave no gap."""
    requested: float
    """The coordinator requested the proposal."""
    proposed: float
    """The draft answered, and the coordinator requested the verification."""
    verified: float
    """The target answered."""
    decided: float
    """The acceptance rule decided this round."""

    @property
    def seconds(self) -> float:
        return self.decided - self.began

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase, from one moment to the next."""
        return {name: end - start for name, (start, end) in zip(PHASES, pairwise(self), strict=True)}


@dataclass(slots=True)
class RoundCost:
    """Cost of a round, from which the cost model predicts later ones."""

    proposed: int
    """Tokens that the target verified; 0: the target worked alone."""
    seconds: float
    """From the end of the previous round to the end of this one."""
    verify_seconds: float
    """Cost of the target's step, as the target measured it."""
    verify_sequences: int
    """Sequences in that step, this one included."""
    verify_tokens: int
    """Tokens of all sequences in that step."""
    draft_seconds: float = 0.0
    """Cost of all steps of the proposal, as the draft measured them; 0 when nothing was proposed."""
    draft_sequences: int = 1
    """Sequences in each of these steps, this one included."""
    was_late: bool = False
    """True if the round waited in vain for a proposal."""
    was_ahead: bool = False
    """True if the proposal had been drafted ahead, so that nothing was waited for."""
    was_led: bool = False
    """True if the target began the round by itself, so that the way to it took no time."""

    def is_typical(self, load: int, tokens: int) -> bool:
        """True if the round took what rounds take in which each of `load` sequences proposes so many tokens.

        Where another sequence proposes more, or reads its prompt, all wait for it. The target alone works on all
        sequences at once, and not on those that a draft works for.
        """
        # One in ten begins or ends.
        is_of_all = self.verify_sequences >= 0.9 * load
        is_not_longer = self.verify_tokens <= 1.05 * self.verify_sequences * (tokens + 1)
        return not self.was_late and is_not_longer and (tokens > 0 or is_of_all)


_NOT_TIMED = RoundTimes(0.0, 0.0, 0.0, 0.0, 0.0)


class Mode(Enum):
    """How a round is made."""

    ALONE = auto()
    """By the target alone."""
    ASKED = auto()
    """The draft is asked for a proposal, then the target verifies it."""
    AHEAD = auto()
    """The draft has worked ahead while the target verified, and is asked only where another outcome came."""


class RoundPlan(NamedTuple):
    """The decision of the controller for one round."""

    tokens: int
    """Tokens to propose; 0: the target works alone."""
    outcomes: int = 0
    """Outcomes that the draft works ahead for meanwhile; 0: for none."""
    load: int = 1
    """Sequences that share the target; 0 where the target is alone in any case, and nobody decides."""
    predicted_gain: float = 0.0
    """Predicted tokens per second with a draft, over those of the target alone; 0: unknown."""

    @property
    def mode(self) -> Mode:
        if not self.tokens:
            return Mode.ALONE
        return Mode.AHEAD if self.outcomes else Mode.ASKED

    @property
    def ahead_budget(self) -> AheadBudget | None:
        """The budget for drafting ahead; None where the draft does not."""
        if self.mode is not Mode.AHEAD:
            return None
        return AheadBudget(self.outcomes, min(self.tokens, MAX_AHEAD_TOKENS))


_ALONE = RoundPlan(0)


class RoundEnded(NamedTuple):
    """A round of a request that has ended, as its listeners learn of it: counts, times and places, nothing of the
    text."""

    proposed: int = 0
    """Tokens that the target verified; 0: the target worked alone."""
    accepted: int = 0
    """Proposed tokens that the completion kept."""
    committed: int = 0
    """Tokens by which the completion grew."""
    plan: RoundPlan = _ALONE
    """The plan that it followed."""
    times: RoundTimes = _NOT_TIMED
    cost: RoundCost | None = None
    """None where the time of this round says nothing about the next one: the target read the prompt, or the sequence
    moved to another replica."""
    has_read: bool = False
    """True if the target read all tokens in it: in the first round, and after a move to another target."""
    is_drafted: bool = False
    """True if the draft answered in time, even with no tokens."""
    forced: int = 0
    """Tokens among those committed that the grammar forced, so that no model was asked for them."""
    draft_address: str | None = None
    """Address of the request's draft, or of the last one that it had; None before any."""
    target_address: str | None = None
    awaited_outcome: bool = False
    """True if the draft was to draft ahead of the round."""
    outcome_rank: int | None = None
    """Place, from 0 on, of the outcome that came; None if it was not drafted for."""
    outcome_step: StepCost | None = None
    """The draft's last step for the outcomes of the round before; None if it has not told."""
    asked_seconds: float | None = None
    """Time in which the draft answered the question of this round; None where it was asked none, or had to be waited
    for from an earlier round."""
    saved_seconds: float = 0.0
    """Usual time to wait for a proposal, which this round did not have to; 0 unless its outcome was drafted for."""
    was_late: bool = False
    """True if it waited in vain for a proposal."""


MAX_RANKS = 16
"""Places among the outcomes with a count of their own."""


def hit_rate(stats: AheadStats) -> float:
    """Share of the rounds that awaited their proposal and found it there; 0 when none did."""
    return stats.hits / stats.awaited if stats.awaited else 0.0


class RoundTally:
    """Counts rounds by their proposed and their accepted tokens."""

    __slots__ = ("_forced", "_rounds", "ahead", "lead")

    def __init__(self) -> None:
        self._rounds = Counter[tuple[int, int]]()
        self._forced = 0
        self.ahead = AheadStats()
        self.lead = LeadStats()

    def add_round(self, ended: RoundEnded) -> None:
        """Count a round, with or without a proposal."""
        self._rounds[ended.proposed, ended.accepted] += 1
        self._forced += ended.forced
        if not ended.awaited_outcome:
            return
        ahead = self.ahead
        ahead.awaited += 1
        rank = ended.outcome_rank
        if rank is None:
            return
        ahead.hits += 1
        ahead.saved_seconds += ended.saved_seconds
        if rank < MAX_RANKS:
            ahead.hits_by_rank += [0] * (rank + 1 - len(ahead.hits_by_rank))
            ahead.hits_by_rank[rank] += 1

    @property
    def counts(self) -> Counter[tuple[int, int]]:
        """Rounds by their proposed and their accepted tokens."""
        return self._rounds

    def stats(self) -> SpeculationStats:
        """The counts as statistics. Their `ahead` and `lead` are the tally's own."""
        stats = SpeculationStats(ahead=self.ahead, lead=self.lead, forced=self._forced)
        longest = max((drafted for drafted, _ in self._rounds), default=0)
        stats.positions = [PositionStats() for _ in range(longest)]
        for (drafted, accepted), rounds in self._rounds.items():
            stats.rounds += rounds
            stats.drafted += rounds * drafted
            stats.accepted += rounds * accepted
            for index, position in enumerate(stats.positions[:drafted]):
                position.drafted += rounds
                position.reached += rounds * (index <= accepted)
                position.accepted += rounds * (index < accepted)
        return stats
