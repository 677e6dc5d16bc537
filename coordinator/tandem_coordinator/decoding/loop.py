"""The round: propose, verify, accept, emit."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from tandem.model.types import Acceptance, Chunk, Proposal, Verification
from tandem_coordinator.decoding.completion import Completion


class Drafter(Protocol):
    """Proposes tokens for a completion."""

    async def propose(self, completion: Completion) -> Proposal:
        """Tokens that may follow, fewer than the completion has room for; an empty proposal without a draft."""


class Verifier(Protocol):
    """Verifies proposals for a completion."""

    async def verify(self, completion: Completion, proposal: Proposal) -> Verification:
        """The target's row at each position of the proposal, and at the one after it."""


AcceptanceRule = Callable[[Proposal, Verification], Acceptance]
"""Decides how much of a proposal is kept, and which token follows it."""


async def generate(
    completion: Completion, drafter: Drafter, verifier: Verifier, accept: AcceptanceRule
) -> AsyncGenerator[Chunk]:
    """Complete a prompt, one round after the other (Leviathan et al. 2023, arXiv 2211.17192, Algorithm 1)."""
    while completion.can_extend:
        proposal = await drafter.propose(completion)
        verification = await verifier.verify(completion, proposal)
        acceptance = accept(proposal, verification)
        yield completion.extend(proposal, acceptance)
