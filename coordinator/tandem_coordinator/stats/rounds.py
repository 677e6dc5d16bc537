"""The result of one round, and the counts of a request's rounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from tandem.model.types import AheadStats, LeadStats, PositionStats, SpeculationStats, StepCost

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


@dataclass(slots=True, eq=False)
class RoundResult:
    """One round of a request: as far as it is known while the round is in progress, and whole once it has ended."""

    proposed: int = 0
    """Tokens that the target verified; 0: the target worked alone."""
    accepted: int = 0
    """Proposed tokens that the completion kept."""
    committed: int = 0
    """Tokens by which the completion grew."""
    times: RoundTimes = _NOT_TIMED
    cost: RoundCost | None = None
    """None where the time of this round says nothing about the next one: the target read the prompt, or the sequence
    moved to another replica."""
    is_drafted: bool = False
    """True if the draft answered in time, even with no tokens."""
    draft_address: str | None = None
    """Address of the request's draft, or of the last one that it had; None before any."""
    target_address: str | None = None
    awaited_outcome: bool = False
    """True if the draft was to draft ahead of the round."""
    outcome_rank: int | None = None
    """Place, from 0 on, of the outcome that came; None if it was not drafted for."""
    branch_step: StepCost | None = None
    """The draft's last step for that outcome and the others that it drafted for; None where it does not say."""
    saved_seconds: float = 0.0
    """Usual time to wait for a proposal, which this round did not have to; 0 unless its outcome was drafted for."""
    was_late: bool = False
    """True if it waited in vain for a proposal."""


MAX_RANKS = 16
"""Places among the outcomes with a count of their own."""


def record_outcome(stats: AheadStats, result: RoundResult) -> None:
    """Count a round, if its proposal was to be drafted ahead."""
    if not result.awaited_outcome:
        return
    stats.awaited += 1
    rank = result.outcome_rank
    if rank is None:
        return
    stats.hits += 1
    stats.saved_seconds += result.saved_seconds
    if rank < MAX_RANKS:
        stats.hits_by_rank += [0] * (rank + 1 - len(stats.hits_by_rank))
        stats.hits_by_rank[rank] += 1


def hit_rate(stats: AheadStats) -> float:
    """Share of the rounds that awaited their proposal and found it there; 0 when none did."""
    return stats.hits / stats.awaited if stats.awaited else 0.0


class RoundTally:
    """Counts rounds by their proposed and their accepted tokens."""

    __slots__ = ("_rounds", "ahead", "lead")

    def __init__(self) -> None:
        self._rounds = Counter[tuple[int, int]]()
        self.ahead = AheadStats()
        self.lead = LeadStats()

    def add(self, drafted: int, accepted: int) -> None:
        """Count one verification, with or without a proposal: its tokens, and how many of them were kept."""
        self._rounds[drafted, accepted] += 1

    def add_result(self, result: RoundResult) -> None:
        self.add(result.proposed, result.accepted)
        record_outcome(self.ahead, result)

    def stats(self) -> SpeculationStats:
        """The counts as statistics. Their `ahead` and `lead` are the tally's own."""
        stats = SpeculationStats(ahead=self.ahead, lead=self.lead)
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
