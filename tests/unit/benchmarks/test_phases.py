"""Where a round's time goes."""

from __future__ import annotations

import asyncio
from typing import cast

from benchmarks.timing.phases import Stopwatch
from coordinator.decoding.completion import Completion
from tandem.types import Acceptance, NextToken, Proposal, TokenRow, Verification


class Slow:
    """Proposes what the round calls for, and verifies, in known times."""

    def __init__(self, *proposals: Proposal) -> None:
        self._proposals = iter(proposals)

    async def propose(self, completion: Completion) -> Proposal:
        await asyncio.sleep(0.02)
        return next(self._proposals)

    async def verify(self, completion: Completion, proposal: Proposal) -> Verification:
        await asyncio.sleep(0.04)
        return Verification(0, (TokenRow(0),))


def accept(proposal: Proposal, verification: Verification) -> Acceptance:
    return Acceptance(0, 1, NextToken.BONUS)


async def test_rounds_with_a_proposal_are_timed_but_for_the_first() -> None:
    some_completion = cast(Completion, None)  # nobody here looks at it
    nothing, something = Proposal(3), Proposal(3, (1, 2))
    slow = Slow(nothing, something, something, nothing, something)
    stopwatch = Stopwatch()
    drafter, verifier, decide = stopwatch.watch(slow, slow, accept)

    for _ in range(5):
        proposal = await drafter.propose(some_completion)
        decide(proposal, await verifier.verify(some_completion, proposal))

    assert {name: len(seconds) for name, seconds in stopwatch.seconds.items()} == {
        "draft": 2,
        "verify": 2,
        "sampling": 2,
        "wait": 2,
    }
    assert min(stopwatch.seconds["draft"]) >= 0.019
    assert min(stopwatch.seconds["verify"]) >= 0.039
    assert max(stopwatch.seconds["sampling"]) < min(stopwatch.seconds["verify"])
