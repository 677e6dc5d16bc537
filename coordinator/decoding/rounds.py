"""Measures the rounds of a request from outside the round loop."""

from __future__ import annotations

import time
from typing import Protocol

from coordinator.decoding.completion import Completion
from coordinator.decoding.loop import AcceptanceRule, Drafter, Verifier
from coordinator.speculation.round_timings import RoundTimings
from coordinator.stats.rounds import RoundResult, RoundTimes
from tandem.types import Acceptance, Chunk, Proposal, Verification


class ServedRequest(Protocol):
    """A running request: its drafter and its verifier note which replicas serve it."""

    draft_address: str | None
    """Address of the draft that proposes for it now; None without one."""
    target_address: str | None
    """Address of the target that verifies for it now; None before the first."""

    @property
    def completion_tokens(self) -> int:
        """Number of tokens committed so far."""


class RoundRecorder:
    """A drafter, a verifier and an acceptance rule that note when they were called."""

    def __init__(
        self,
        drafter: Drafter,
        verifier: Verifier,
        accept: AcceptanceRule,
        timings: RoundTimings,
        request: ServedRequest,
    ) -> None:
        """
        Args:
            drafter: Is asked in `propose`.
            verifier: Is asked in `verify`.
            accept: Decides in `accept`.
            timings: Filled by drafter and verifier during the round.
            request: Says which replicas serve it.
        """
        self._drafter = drafter
        self._verifier = verifier
        self._accept = accept
        self._timings = timings
        self._request = request
        self._draft_address: str | None = None
        self._decided = time.perf_counter()
        self._began = self._asked = self._proposed = self._verified = self._decided

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
        self._began, self._decided = self._decided, time.perf_counter()
        return acceptance

    def result(self, chunk: Chunk) -> RoundResult:
        """The result of the round that ended with this chunk. Call it once for each chunk, before the next round."""
        times = RoundTimes(self._began, self._asked, self._proposed, self._verified, self._decided)
        self._draft_address = self._request.draft_address or self._draft_address
        timings = self._timings
        is_drafted, awaited, rank = timings.is_drafted, timings.awaited_outcome, timings.outcome_rank
        saved_seconds = timings.saved_seconds
        return RoundResult(
            chunk.proposed,
            sum(chunk.drafted),
            len(chunk.token_ids),
            times,
            self._timings.end_round(times.seconds),
            is_drafted,
            self._draft_address,
            self._request.target_address,
            awaited,
            rank,
            saved_seconds,
        )
