"""The question of a round to its target, and how it came about."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.model.types import NO_LEAD, Lead, OwnHead, Proposal, StepCost, Verification
from tandem_coordinator.outcomes import IDLE, Away, Coming, Hit, Idle, Outcome
from tandem_coordinator.stats.rounds import RoundCost


@dataclass(frozen=True, slots=True)
class Asked:
    """The answer of a draft that was asked for a proposal."""

    proposal: Proposal
    seconds: float | None = None
    """Time of the whole step; None if an earlier one had to be waited for."""


@dataclass(frozen=True, slots=True)
class Late:
    """A draft that was asked did not answer in time."""


@dataclass(slots=True)
class Question:
    """A proposal for the target to verify, or that its own head is to make one."""

    asked: Proposal | OwnHead
    lead: Lead = NO_LEAD
    """The lead that the target is granted behind it."""
    outcome: Outcome | Away = IDLE
    """The continuation that the draft had ready when the last round ended."""
    answer: Asked | Late | None = None
    """How the draft answered in this round; None where it was not asked."""
    is_forced: bool = False
    """True if the proposal is what the grammar forces."""

    @property
    def given(self) -> Proposal:
        """The proposal that the coordinator gives."""
        assert isinstance(self.asked, Proposal), "the target's own head is not a draft's business"
        return self.asked

    def proposal_of(self, verification: Verification) -> Proposal:
        """The proposal that was verified. A target without a head has verified none in its place."""
        if isinstance(self.asked, Proposal):
            return self.asked
        return verification.proposal or Proposal(verification.base_length)

    @property
    def awaited_outcome(self) -> bool:
        """True if the draft was to have its proposal ready."""
        return not isinstance(self.outcome, Idle | Away)

    @property
    def outcome_rank(self) -> int | None:
        """Place of the outcome that came among those that were drafted for; None if it was none of them."""
        return self.outcome.rank if isinstance(self.outcome, Hit | Coming) else None

    @property
    def is_drafted(self) -> bool:
        """True if the draft answered in time, even with no tokens."""
        return isinstance(self.answer, Asked) or self.outcome_rank is not None

    def cost(
        self, verification: Verification, load: int, verify_seconds: float, seconds: float
    ) -> RoundCost | None:
        """The cost of its round; None where that says nothing about the next one.

        The times that a service reports of its own steps come first: what the coordinator measures includes messages.
        Where a service reports nothing, the measurement counts, as if one step had served all of the load.

        Args:
            verification: The target's answer.
            load: Sequences that share the target.
            verify_seconds: From the question to the answer.
            seconds: Of the whole round.
        """
        proposal = self.proposal_of(verification)
        proposed = len(proposal)
        verify = verification.cost or StepCost(verify_seconds, load, load * (proposed + 1))
        rank = self.outcome_rank
        cost = RoundCost(
            proposed,
            seconds,
            verify.seconds,
            verify.sequences,
            verify.tokens,
            was_late=isinstance(self.answer, Late),
            was_ahead=rank is not None,
            was_led=verification.led > 0,
        )
        if not proposed or rank is not None:
            return cost
        if isinstance(self.asked, OwnHead):
            draft = proposal.cost or StepCost(0.0, load, 0)
        elif not isinstance(self.answer, Asked) or self.answer.seconds is None:
            return None  # an earlier round had asked for the proposal, or nobody had
        else:
            draft = self.answer.proposal.cost or StepCost(self.answer.seconds, load, 0)
        cost.draft_seconds = draft.seconds
        cost.draft_sequences = draft.sequences
        return cost
