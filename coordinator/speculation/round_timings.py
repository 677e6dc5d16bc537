"""Times of a request's rounds, and how long the request therefore waits for its draft. No clock."""

from __future__ import annotations

from coordinator.stats.moving_average import MovingAverage
from coordinator.stats.rounds import RoundCost
from tandem.types import Proposal, StepCost

_VERIFICATIONS = 4.0
"""A request stops waiting for its draft after its usual time and so many verifications."""
_MIN_SECONDS = 0.25
"""Shorter waits would take a pause of the machine for a lost draft."""
_MAX_SECONDS = 0.8
"""A draft that hangs stops a stream once, for less than a second."""
_NO_DRAFTING = StepCost(0.0, 1, 0)


class RoundTimings:
    """Times of one request's rounds, and of the round in progress.

    The times that a service reports for its own steps come first: what the coordinator measures includes messages.
    Where a service reports nothing, the coordinator's measurement counts, as if one step had served all of the load.
    """

    def __init__(self, patience_seconds: float | None) -> None:
        self.load = 1
        """Sequences that share the target in the round in progress, for services that do not say."""
        self.is_drafted = False
        """True if the draft has answered in the round in progress."""
        self._patience_seconds = patience_seconds
        self._reading: float | None = None
        self._verification: tuple[float, StepCost | None, int] | None = None
        """The target's part of the round in progress: seconds, cost, proposed tokens. None during prefill."""
        self._drafting: tuple[float, StepCost | None] | None = None
        """The draft's part: seconds, cost."""
        self._was_late = False
        self.awaited_outcome = False
        """True if the draft was to draft ahead of the round in progress."""
        self.outcome_rank: int | None = None
        """Place of the outcome that came among those that it drafted for; None if it was not one of them."""
        self.proposing = MovingAverage()
        self.verifying = MovingAverage()
        """Time to verify a proposal that is not empty."""
        self.extending = MovingAverage()
        """Time to verify an empty proposal: the target alone."""

    def verified(
        self, seconds: float, proposed: int, *, is_first: bool, cost: StepCost | None = None
    ) -> None:
        """Count a verification of so many proposed tokens. The first one of a stream also reads all tokens."""
        self._verification = None if is_first else (seconds, cost, proposed)
        if is_first:
            self._reading = seconds
        elif proposed:
            self.verifying.add(seconds)
        else:
            self.extending.add(seconds)

    def drafted(self, seconds: float, cost: StepCost | None) -> None:
        """Count the proposal of the round in progress."""
        self.proposing.add(seconds)
        self._drafting = seconds, cost

    def drafted_ahead(self, proposal: Proposal | None) -> None:
        """The proposal of the round in progress was to be drafted ahead; None: another outcome came."""
        self.awaited_outcome = True
        self.outcome_rank = None if proposal is None else proposal.outcome_rank

    @property
    def saved_seconds(self) -> float:
        """Usual time of a proposal if the one of the round in progress was drafted ahead, else 0."""
        return 0.0 if self.outcome_rank is None else self.proposing.value or 0.0

    def was_late(self) -> None:
        """Note that the round in progress waited in vain for a proposal."""
        self._was_late = True

    def end_round(self, seconds: float) -> RoundCost | None:
        """The cost of the round that has ended; None when it says nothing about the next one.

        Args:
            seconds: From the end of the previous round to the end of this one.
        """
        verification, self._verification = self._verification, None
        drafting, self._drafting = self._drafting, None
        was_late, self._was_late = self._was_late, False
        self.is_drafted = False
        was_ahead = self.outcome_rank is not None
        self.awaited_outcome, self.outcome_rank = False, None
        if verification is None:
            return None
        verify_seconds, verify_cost, proposed = verification
        if proposed and drafting is None and not was_ahead:
            return None  # an earlier round had asked for the proposal
        load = self.load
        verify = verify_cost or StepCost(verify_seconds, load, load * (proposed + 1))
        draft = _NO_DRAFTING
        if proposed and drafting is not None:
            draft_seconds, draft_cost = drafting
            draft = draft_cost or StepCost(draft_seconds, load, 0)
        return RoundCost(
            proposed,
            seconds,
            verify.seconds,
            verify.sequences,
            verify.tokens,
            draft.seconds,
            draft.sequences,
            was_late,
            was_ahead,
        )

    @property
    def patience_seconds(self) -> float:
        """How long to wait for a proposal: its usual time and a few verifications."""
        if self._patience_seconds is not None:
            return self._patience_seconds
        verification = self.verifying.value or self.extending.value or self._reading or 0.0
        usual = self.proposing.value or 0.0
        return min(max(usual + _VERIFICATIONS * verification, _MIN_SECONDS), _MAX_SECONDS)
