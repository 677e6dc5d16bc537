"""Snapshot of a replica for display and counting: plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tandem.errors import NotFoundError
from tandem.model.types import Coverage, ModelInfo, SpeculationStats


class Role(Enum):
    """Service that a replica belongs to."""

    DRAFT = "draft"
    TARGET = "target"


class ReplicaState(Enum):
    """State of a replica, the best first: whether it takes new sequences, and if not why."""

    READY = "ready"
    """Takes new sequences."""
    DRAINING = "draining"
    """Finishes its sequences and accepts no new ones: by its own report, or because an operator drained it."""
    CONNECTING = "connecting"
    """Not reached or not ready yet."""
    INCOMPATIBLE = "incompatible"
    """Reached, but its model does not go with the others'."""
    REFUSED = "refused"
    """Reached, but it refuses the coordinator's token."""
    DOWN = "down"
    """Reached before, but not reachable now."""


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """A replica at one moment."""

    role: Role
    address: str
    """host:port, resolved."""
    state: ReplicaState
    reason: str
    """Reason for its state, in a sentence; empty when all is well."""
    since_seconds: float
    """Seconds since it entered that state."""
    open_sequences: int
    round_trip_seconds: float | None
    """Moving average of the time to answer a health check; None before the first."""
    step_seconds: float | None
    """Moving average of the time from a step to its answer; None before the first."""
    figures: SpeculationStats
    """Of the proposals that it made (a draft) or verified (a target)."""
    model: ModelInfo | None
    """None until it was reached."""
    coverage: Coverage | None = None
    """How much of its vocabulary the target's covers, for a draft with another tokenizer; None for any other."""


def replica_at(replicas: Sequence[ReplicaSnapshot], address: str) -> ReplicaSnapshot:
    """The replica at an address."""
    found = next((replica for replica in replicas if replica.address == address), None)
    if found is None:
        known = ", ".join(replica.address for replica in replicas) or "none"
        raise NotFoundError(f"there is no replica {address!r}; there are: {known}")
    return found


def is_last_target(replica: ReplicaSnapshot, replicas: Sequence[ReplicaSnapshot]) -> bool:
    """True if no other target takes new sequences."""
    ready = [each for each in replicas if each.role is Role.TARGET and each.state is ReplicaState.READY]
    return ready == [replica]
