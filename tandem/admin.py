"""The nouns of administration: what a coordinator tells of itself, and what it can be told.

Nothing here knows of gRPC: `tandem.wire.admin` is where these types meet protobuf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, IntEnum

from tandem.config.layers import Origin
from tandem.replica import ReplicaSnapshot
from tandem.types import SpeculationFigures


class CoordinatorState(Enum):
    """Whether a coordinator can complete requests."""

    STARTING = "starting"
    """Not yet: it has not met its services."""
    READY = "ready"
    """With all that it was set up with."""
    DEGRADED = "degraded"
    """It can, but slower than it should: no draft takes new sequences, or a replica is lost."""
    UNAVAILABLE = "unavailable"
    """No target takes new sequences."""

    @property
    def completes(self) -> bool:
        """Whether requests are completed."""
        return self in (CoordinatorState.READY, CoordinatorState.DEGRADED)


@dataclass(frozen=True, slots=True)
class Load:
    """How much is being done."""

    running: int
    """Requests that run."""
    queued: int
    """Requests that wait for their turn."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens of completions per second."""

    last_10_seconds: float
    last_60_seconds: float


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """What a new request gets that says nothing else."""

    is_on: bool
    """Whether a draft proposes at all."""
    num_speculative_tokens: int
    rule: str
    """Acceptance rule for a temperature above 0."""


@dataclass(frozen=True, slots=True)
class Status:
    """A coordinator at one moment."""

    version: str
    state: CoordinatorState
    time: datetime
    """The coordinator's clock."""
    uptime_seconds: float
    model: str
    """Name of the target's; empty until one was reached."""
    load: Load
    throughput: Throughput
    speculation: SpeculationFigures
    """Since the start."""
    settings: SpeculationSettings
    replicas: tuple[ReplicaSnapshot, ...]


@dataclass(frozen=True, slots=True)
class RequestReport:
    """A request that runs, at one moment."""

    request_id: str
    age_seconds: float
    prompt_tokens: int
    completion_tokens: int
    """So far."""
    rule: str
    num_speculative_tokens: int
    """0: the target alone."""
    draft_address: str | None
    target_address: str | None
    speculation: SpeculationFigures


@dataclass(frozen=True, slots=True)
class Outcomes:
    """How requests ended. Those that were refused before they began are not among them."""

    completed: int = 0
    """Their client has all of it."""
    failed: int = 0
    """A service failed, or the deadline passed."""
    cancelled: int = 0
    """Their client went away."""
    aborted: int = 0
    """An administrator ended them."""


@dataclass(frozen=True, slots=True)
class Stats:
    """What a coordinator did since its start, the requests that run included."""

    time: datetime
    """The coordinator's clock."""
    uptime_seconds: float
    load: Load
    throughput: Throughput
    outcomes: Outcomes
    completion_tokens: int
    speculation: SpeculationFigures
    by_rule: Mapping[str, SpeculationFigures]


@dataclass(frozen=True, slots=True)
class ConfigOption:
    """An option of the coordinator, and where its value comes from."""

    name: str
    value: object
    """Of a type that JSON has."""
    origin: Origin
    is_live: bool
    """Whether it can be changed while the coordinator runs."""
    changed_by: str = ""
    """Who changed it last; empty unless the origin is LIVE."""
    changed_at: datetime | None = None


class Severity(IntEnum):
    """How bad a finding is, the worst last."""

    OK = 0
    WARNING = 1
    """It works, but worse than it could."""
    PROBLEM = 2
    """Requests fail, or will."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that was looked at."""

    check: str
    """What was looked for, in a word or two."""
    subject: str
    """What was looked at: an address, an option; empty for the coordinator itself."""
    severity: Severity
    detail: str
    """What was found, in a sentence."""
    advice: str = ""
    """What to do about it."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a coordinator finds when it looks at itself and its services."""

    version: str
    time: datetime
    """The coordinator's clock while it answered."""
    findings: tuple[Finding, ...]
