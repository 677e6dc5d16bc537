"""Whether drafting pays for a request: its measured cost against its measured gain. No clock and no I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import fmean, median

from coordinator.restraint import Restraint

TRIAL_ROUNDS = 24
"""Rounds with a proposal before the first verdict; acceptance in fewer says little."""
PROBE_ROUNDS = 8
"""Rounds with a proposal after a pause, before the next verdict."""
FIRST_PAUSE_ROUNDS = 32
LONGEST_PAUSE_ROUNDS = 1024
LEAST_GAIN = 0.97
"""Drafting goes on while it makes at least as many tokens in a time as the target alone, all but for noise."""


@dataclass(frozen=True, slots=True)
class RoundCost:
    """What one round took and gave."""

    was_asked: bool
    """Whether a draft was asked for a proposal, and waited for."""
    accepted: int
    """Tokens; 0 as well when the draft was late."""
    proposing_seconds: float
    seconds: float
    """All of it, until the next one began: a message also takes the time of whoever reads and writes it."""


def gain(tokens_per_round: float, proposing: float, whole: float, extending: float | None) -> float:
    """Tokens in a time with drafting, over those without.

    Args:
        tokens_per_round: Accepted tokens of a round and the target's own.
        proposing: Seconds of a round in which it waits for the proposal.
        whole: Seconds of all of the round.
        extending: Seconds of a round in which the target alone extends a sequence by one token; None when there was
            none, which is taken to be what a round takes beside the proposal: in favour of drafting.
    """
    without = whole - proposing
    alone = without if extending is None else min(extending, without)
    return tokens_per_round * alone / max(whole, 1e-9)


class Payoff:
    """Follows a request's rounds, pauses drafting when it does not pay, and probes it again, ever more rarely."""

    def __init__(self, *, may_pause: bool, restraint: Restraint | None = None) -> None:
        """
        Args:
            may_pause: Whether what was measured may change in which rounds how much is proposed.
            restraint: What all requests share, and follow as far as they may.
        """
        self._may_pause = may_pause
        self._restraint = restraint if may_pause else None
        self._restrained: int | None = None
        """Tokens that the restraint allows this round; None when it was not asked."""
        self._extending: deque[float] = deque(maxlen=TRIAL_ROUNDS)
        self._next_pause_rounds = FIRST_PAUSE_ROUNDS
        self._rounds_left = 0
        self._begin(TRIAL_ROUNDS)
        self._rounds_asked_for = 0
        if self._restraint is not None:
            self._restraint.join()

    def end(self) -> None:
        """The request has ended."""
        if self._restraint is not None:
            if self._rounds_asked_for <= 1:
                self._restraint.begun()
            self._restraint.leave()
            self._restraint = None

    @property
    def is_paused(self) -> bool:
        """Whether the target works alone."""
        return self._rounds_left > 0

    @property
    def pause_rounds(self) -> int:
        """For how many more rounds."""
        return self._rounds_left

    def tokens(self, most: int) -> int:
        """How many to ask the draft for in the round that begins, up to `most`; 0: the target works alone."""
        self._restrained = None
        self._rounds_asked_for += 1
        if self.is_paused:
            self._count_pause()
            return 0
        if self._restraint is None:
            return most
        if self._rounds_asked_for == 1 and self._restraint.is_burst:
            return 0
        if self._rounds_asked_for == 2:
            self._restraint.begun()
        self._restrained = self._restraint.tokens
        return min(most, self._restrained)

    def _count_pause(self) -> None:
        """Another round goes by without a draft because of the pause."""
        self._rounds_left -= 1
        if self._rounds_left == 0:
            self._begin(PROBE_ROUNDS)

    def add(self, cost: RoundCost) -> bool:
        """Count a round. Whether drafting is paused from here on."""
        self._tell_restraint(cost)
        if not cost.was_asked:
            self._extending.append(cost.seconds)
            return False
        self._rounds.append(cost)
        if not self._may_pause or len(self._rounds) < self._wanted_rounds:
            return False
        if self._pays():
            self._next_pause_rounds = FIRST_PAUSE_ROUNDS
            self._begin(TRIAL_ROUNDS)
            return False
        self._rounds_left = self._next_pause_rounds
        self._next_pause_rounds = min(2 * self._next_pause_rounds, LONGEST_PAUSE_ROUNDS)
        return True

    def _tell_restraint(self, cost: RoundCost) -> None:
        if self._restraint is None:
            return
        wanted = self._restrained
        # A round that lacked its draft says nothing of those that have one.
        if wanted is None or cost.was_asked != (wanted > 0):
            self._restraint.add(wanted)
        else:
            self._restraint.add(wanted, cost.accepted, cost.seconds)

    def _pays(self) -> bool:
        """The verdict on the rounds since the last one. A hiccup of the machine does not move a median."""
        tokens_per_round = 1.0 + fmean(cost.accepted for cost in self._rounds)
        proposing = median(cost.proposing_seconds for cost in self._rounds)
        whole = median(cost.seconds for cost in self._rounds)
        extending = median(self._extending) if self._extending else None
        return gain(tokens_per_round, proposing, whole, extending) >= LEAST_GAIN

    def _begin(self, wanted_rounds: int) -> None:
        self._wanted_rounds = wanted_rounds
        self._rounds: list[RoundCost] = []
