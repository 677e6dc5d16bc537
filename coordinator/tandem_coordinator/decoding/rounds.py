"""Measures the rounds of a request from outside the round loop."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from tandem.model.types import Acceptance, Chunk, Proposal, StepCost, Verification
from tandem_coordinator.decoding.loop import AcceptanceRule
from tandem_coordinator.stats.rounds import RoundCost, RoundResult, RoundTimes
from tandem_coordinator.stats.speculation import MovingAverage

_VERIFICATIONS = 4.0
"""A request stops waiting for its draft after its usual time and so many verifications."""
_MIN_SECONDS = 0.25
"""Shorter waits would take a pause of the machine for a lost draft."""
_MAX_SECONDS = 0.8
"""A draft that hangs stops a stream once, for less than a second."""


class RequestRounds:
    """The rounds of one request: which replicas serve them now, how long they take, and the one in progress.

    The times that a service reports for its own steps come first: what the coordinator measures includes messages.
    Where a service reports nothing, the coordinator's measurement counts, as if one step had served all of the load.
    """

    def __init__(self, patience_seconds: float | None = None) -> None:
        self.draft_address: str | None = None
        """Address of the draft that proposes now; None without one."""
        self.target_address: str | None = None
        """Address of the target that verifies now; None before the first."""
        self.load = 1
        """Sequences that share the target in the round in progress, for services that do not say."""
        self.round = RoundResult()
        """The round in progress."""
        self._cost: RoundCost | None = None
        """Its cost as far as the target's part is known; None during prefill."""
        self._drafting: StepCost | None = None
        """The cost of the draft's part."""
        self.proposing = MovingAverage()
        self.verifying = MovingAverage()
        """Time to verify a proposal that is not empty."""
        self.extending = MovingAverage()
        """Time to verify an empty proposal: the target alone."""
        self._reading: float | None = None
        self._patience_seconds = patience_seconds
        self._last_draft: str | None = None
        self._decided = time.perf_counter()
        self._began = self._requested = self._proposed = self._verified = self._decided

    def timed(self, accept: AcceptanceRule) -> AcceptanceRule:
        """The rule, whose decisions end the rounds."""

        def decide(proposal: Proposal, verification: Verification) -> Acceptance:
            acceptance = accept(proposal, verification)
            self._began, self._decided = self._decided, time.perf_counter()
            return acceptance

        return decide

    async def results(self, chunks: AsyncGenerator[Chunk]) -> AsyncGenerator[tuple[Chunk, RoundResult]]:
        """The chunks of the round loop, each with the result of its round."""
        async with aclosing(chunks):
            self._requested = time.perf_counter()
            async for chunk in chunks:
                yield chunk, self.result(chunk)
                self._requested = time.perf_counter()

    def result(self, chunk: Chunk) -> RoundResult:
        """The result of the round that ended with this chunk. Call it once for each chunk, before the next round."""
        ended, proposed = self.round, chunk.proposed
        ended.proposed, ended.accepted, ended.committed = proposed, sum(chunk.drafted), len(chunk.token_ids)
        ended.times = RoundTimes(self._began, self._requested, self._proposed, self._verified, self._decided)
        ended.draft_address = self._last_draft = self.draft_address or self._last_draft
        ended.target_address = self.target_address
        if ended.outcome_rank is not None:
            ended.saved_seconds = self.proposing.value or 0.0
        ended.cost = self.end_round(ended.times.seconds)
        return ended

    def proposed(self) -> None:
        """The proposal is there, and is being verified from now on."""
        self._proposed = time.perf_counter()

    def verified(self, seconds: float, proposed: int, verification: Verification, *, is_first: bool) -> None:
        """Count a verification of so many proposed tokens. The first one of a stream also reads all tokens."""
        self._verified = time.perf_counter()
        self._cost = None
        if is_first:
            self._reading = seconds
            return
        (self.verifying if proposed else self.extending).add(seconds)
        cost = verification.cost or StepCost(seconds, self.load, self.load * (proposed + 1))
        was_led = verification.proposed is not None
        self._cost = RoundCost(proposed, 0.0, cost.seconds, cost.sequences, cost.tokens, was_led=was_led)

    def drafted(self, seconds: float, cost: StepCost | None) -> None:
        self.proposing.add(seconds)
        self._drafting = cost or StepCost(seconds, self.load, 0)

    def drafted_ahead(self, proposal: Proposal | None, branch_step: StepCost | None = None) -> None:
        """The proposal of the round in progress was to be drafted ahead; None: another outcome came. With it, the
        draft's last step for all outcomes."""
        self.round.awaited_outcome = True
        self.round.branch_step = branch_step
        self.round.outcome_rank = None if proposal is None else proposal.outcome_rank

    def end_round(self, seconds: float) -> RoundCost | None:
        """The cost of the round that has ended; None when it says nothing about the next one."""
        ended, cost, drafting = self.round, self._cost, self._drafting
        self.round, self._cost, self._drafting = RoundResult(), None, None
        if cost is None:
            return None
        was_ahead = ended.outcome_rank is not None
        if cost.proposed and drafting is not None:
            cost.draft_seconds, cost.draft_sequences = drafting.seconds, drafting.sequences
        elif cost.proposed and not was_ahead:
            return None  # an earlier round had asked for the proposal
        cost.seconds, cost.was_late, cost.was_ahead = seconds, ended.was_late, was_ahead
        return cost

    @property
    def patience_seconds(self) -> float:
        """How long to wait for a proposal: its usual time and a few verifications."""
        if self._patience_seconds is not None:
            return self._patience_seconds
        verification = self.verifying.value or self.extending.value or self._reading or 0.0
        usual = self.proposing.value or 0.0
        return min(max(usual + _VERIFICATIONS * verification, _MIN_SECONDS), _MAX_SECONDS)
