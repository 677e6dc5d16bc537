"""Drafts for a request or a foreign engine's sequence with whichever draft is available."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.replicas.pool import Member
from coordinator.transport.draft_client import DraftClient, DraftSequence

MAX_FAULTS = 8
"""A request that loses so many drafts goes on without one."""
_FORGIVEN_ROUNDS = 32
"""After so many proposals, earlier losses no longer count."""
_FIRST_RETRY_SECONDS = 0.1
_LAST_RETRY_SECONDS = 5.0
"""A request avoids a draft that failed it for a while, longer each time."""
_MAX_DOUBLINGS = 6


@dataclass(slots=True)
class DraftLosses:
    """Failures of a request's drafts so far."""

    count: int = 0
    faults: int = 0
    """Failures other than a lack of room."""
    rounds_since: int = 0
    retry_at: dict[Member[DraftClient], float] = field(default_factory=dict)

    @property
    def are_too_many(self) -> bool:
        """True if the request is to go on without a draft."""
        return self.faults >= MAX_FAULTS

    def add(self, member: Member[DraftClient], *, is_fault: bool) -> None:
        """Count a lost draft; a fault is more than a lack of room."""
        wait = min(_FIRST_RETRY_SECONDS * 2 ** min(self.count, _MAX_DOUBLINGS), _LAST_RETRY_SECONDS)
        self.retry_at[member] = time.monotonic() + wait
        self.count += 1
        self.faults += is_fault
        self.rounds_since = 0

    def add_round(self) -> None:
        """Count a proposal."""
        self.rounds_since += 1
        if self.rounds_since >= _FORGIVEN_ROUNDS:
            self.count = self.faults = 0

    @property
    def avoided(self) -> set[Member[DraftClient]]:
        """Drafts that were lost too short a time ago to be tried again."""
        now = time.monotonic()
        return {member for member, moment in self.retry_at.items() if now < moment}


def bound_elsewhere(
    members: Iterable[Member[DraftClient]], target_address: str | None
) -> set[Member[DraftClient]]:
    """Drafts that read the hidden states of another target than the one at this address."""
    return {member for member in members if not member.goes_with(target_address)}


@dataclass(slots=True, eq=False)
class DraftPlace:
    """A sequence on a draft."""

    member: Member[DraftClient]
    sequence: DraftSequence
    is_resumption: bool
    """True if the request lost another draft before."""

    def leave(self) -> None:
        """Drop the sequence there."""
        self.sequence.cancel()
        self.member.open_sequences -= 1
