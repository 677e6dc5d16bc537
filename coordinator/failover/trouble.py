"""Failures of a round on the way to a target's answer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from coordinator.replicas.member import Member
from coordinator.transport.target_client import TargetClient


@dataclass(slots=True, eq=False)
class RoundTrouble:
    """Failures in the round in progress."""

    began: float | None = None
    """Time of the first failure, by the monotonic clock; None before it."""
    losses: int = 0
    """Targets that were lost during a request to them."""
    is_reported: bool = False
    """True if a loss was reported to the observer."""
    avoided: set[Member[TargetClient]] = field(default_factory=set)
    """Targets that had no room or sent invalid answers."""

    @property
    def seconds(self) -> float:
        """Seconds since the first failure. The time before it does not count, since a prompt may take minutes."""
        return 0.0 if self.began is None else time.monotonic() - self.began

    def begin(self) -> None:
        """A failure occurred."""
        if self.began is None:
            self.began = time.monotonic()
