"""Times the rounds of a request from outside the round loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.completion import Completion
from coordinator.generate import AcceptanceRule, Drafter, Verifier
from tandem.types import Acceptance, Proposal, Verification


@dataclass(frozen=True, slots=True)
class Round:
    """One round, by the performance counter, in seconds."""

    began: float
    """When the round before had been decided; the request's rounds leave no gap."""
    asked: float
    """When the draft was asked."""
    proposed: float
    """When its answer was there, and the target was asked."""
    verified: float
    """When the target's answer was there."""
    decided: float
    """When the acceptance rule had decided."""
    proposal: Proposal
    acceptance: Acceptance

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.decided - self.began

    @property
    def wait(self) -> float:
        """Detokenizing, the client that reads, the event loop's other work."""
        return self.asked - self.began

    @property
    def draft(self) -> float:
        """Asking the draft."""
        return self.proposed - self.asked

    @property
    def verify(self) -> float:
        """Asking the target."""
        return self.verified - self.proposed

    @property
    def sampling(self) -> float:
        """The acceptance rule."""
        return self.decided - self.verified


class TimedRounds:
    """A drafter, a verifier and an acceptance rule that tell of each round they make."""

    def __init__(
        self, drafter: Drafter, verifier: Verifier, accept: AcceptanceRule, tell: Callable[[Round], None]
    ) -> None:
        self._drafter = drafter
        self._verifier = verifier
        self._accept = accept
        self._tell = tell
        self._decided = time.perf_counter()
        self._asked = self._proposed = self._verified = self._decided

    async def propose(self, completion: Completion) -> Proposal:
        """The drafter's proposal."""
        self._asked = time.perf_counter()
        proposal = await self._drafter.propose(completion)
        self._proposed = time.perf_counter()
        return proposal

    async def verify(self, completion: Completion, proposal: Proposal) -> Verification:
        """The verifier's verification."""
        verification = await self._verifier.verify(completion, proposal)
        self._verified = time.perf_counter()
        return verification

    def accept(self, proposal: Proposal, verification: Verification) -> Acceptance:
        """The rule's decision."""
        acceptance = self._accept(proposal, verification)
        began, self._decided = self._decided, time.perf_counter()
        self._tell(
            Round(began, self._asked, self._proposed, self._verified, self._decided, proposal, acceptance)
        )
        return acceptance
