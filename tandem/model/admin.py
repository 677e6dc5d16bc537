"""The nouns of administration: a coordinator's status, statistics, options and findings.

Nothing here knows of gRPC: `tandem.wire.admin` is where these types meet protobuf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, IntEnum

from tandem.config.origin import Origin
from tandem.model.replica import ReplicaSnapshot
from tandem.model.speculation_state import SpeculationDecision, SpeculationState
from tandem.model.types import SamplingDefaults, SpeculationStats


class CoordinatorState(Enum):
    """Health of a coordinator."""

    STARTING = "starting"
    """The coordinator has not reached its services yet."""
    READY = "ready"
    """Requests are completed, by all replicas."""
    DEGRADED = "degraded"
    """Requests are completed, but slower than they should be: no draft takes new sequences, or a replica is lost."""
    UNAVAILABLE = "unavailable"
    """No target takes new sequences."""

    @property
    def completes(self) -> bool:
        return self in (CoordinatorState.READY, CoordinatorState.DEGRADED)


@dataclass(frozen=True, slots=True)
class Load:
    """Running and waiting requests."""

    running: int
    queued: int


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens of completions per second."""

    last_10_seconds: float
    last_60_seconds: float


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """Defaults for new requests."""

    is_on: bool
    """True if a draft proposes at all."""
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
    """Name of the target's model; empty until one was reached."""
    load: Load
    throughput: Throughput
    speculation: SpeculationStats
    """Since the start."""
    settings: SpeculationSettings
    replicas: tuple[ReplicaSnapshot, ...]
    speculation_state: SpeculationState
    decisions: tuple[SpeculationDecision, ...] = ()
    """The proposal length at each load so far, and the reason."""
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    """Parameters of a request that names none."""


@dataclass(frozen=True, slots=True)
class RequestReport:
    """A request that runs, at one moment."""

    request_id: str
    age_seconds: float
    prompt_tokens: int
    completion_tokens: int
    rule: str
    num_speculative_tokens: int
    """0: the target alone."""
    draft_address: str | None
    target_address: str | None
    speculation: SpeculationStats
    speculation_state: SpeculationState


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Counts of ended requests, without those that were refused before they began."""

    completed: int = 0
    """Requests whose clients received everything."""
    failed: int = 0
    """Requests that ended with a service's failure, or by their deadline."""
    cancelled: int = 0
    """Requests whose clients went away."""
    aborted: int = 0
    """Requests that an administrator ended."""


@dataclass(frozen=True, slots=True)
class Stats:
    """A coordinator's statistics since its start, running requests included."""

    time: datetime
    """The coordinator's clock."""
    uptime_seconds: float
    load: Load
    throughput: Throughput
    outcomes: Outcomes
    completion_tokens: int
    speculation: SpeculationStats
    by_rule: Mapping[str, SpeculationStats]
    speculation_state: SpeculationState
    decisions: tuple[SpeculationDecision, ...] = ()
    """The proposal length at each load so far, and the reason."""


@dataclass(frozen=True, slots=True)
class ConfigOption:
    """An option of the coordinator with its value and its origin."""

    name: str
    value: object
    """The value, in a type that JSON has."""
    origin: Origin
    is_live: bool
    """True if it can be changed while the coordinator runs."""
    changed_by: str = ""
    """Empty unless the origin is LIVE."""
    changed_at: datetime | None = None


class Severity(IntEnum):
    """Severity of a finding, the worst last."""

    OK = 0
    WARNING = 1
    """Something works worse than it could."""
    PROBLEM = 2
    """Requests fail, or will."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    """Name of the check, in a word or two."""
    subject: str
    """Subject of the finding: an address or an option; empty for the coordinator itself."""
    severity: Severity
    detail: str
    advice: str = ""

    @classmethod
    def ok(cls, check: str, detail: str, subject: str = "") -> Finding:
        return cls(check, subject, Severity.OK, detail)

    @classmethod
    def warning(cls, check: str, detail: str, advice: str = "", subject: str = "") -> Finding:
        return cls(check, subject, Severity.WARNING, detail, advice)

    @classmethod
    def problem(cls, check: str, detail: str, advice: str = "", subject: str = "") -> Finding:
        return cls(check, subject, Severity.PROBLEM, detail, advice)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A coordinator's diagnosis of itself and its services."""

    version: str
    time: datetime
    """The coordinator's clock while it answered."""
    findings: tuple[Finding, ...]
