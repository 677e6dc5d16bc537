"""A sequence's place on a draft."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.replicas.member import Member
from coordinator.transport.draft_client import DraftClient
from coordinator.transport.draft_sequence import DraftSequence


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
