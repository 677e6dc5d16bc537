"""The setup that a worker receives from its parent, and its share of the bounds."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from coordinator.settings.coordinator import CoordinatorSettings


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """A worker's place among the others, and the state that it begins with."""

    index: int
    """From 0 on."""
    port: int
    """For gRPC; the same for all."""
    folder: str
    """Holds the sockets between parent and workers."""
    http_socket: int | None = None
    """Number of the inherited socket that listens for HTTP; None without HTTP."""
    listens_late: bool = False
    """True if others answer already, so that no connection is to come here before it is ready."""
    changes: dict[str, str] = field(default_factory=dict)
    """Options changed while the coordinator ran, as `LiveConfig.change` takes them."""
    drained: list[str] = field(default_factory=list)
    """Addresses of the replicas that an operator drained."""

    def to_json(self) -> str:
        """As one word of a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerSetup:
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))

    @property
    def address(self) -> str:
        """The worker's own address, for its parent alone."""
        return worker_address(self.folder, self.index)


def worker_address(folder: str, index: int) -> str:
    """Address at which a worker answers its parent, as gRPC spells it."""
    return f"unix:{Path(folder) / f'worker-{index}'}"


def parent_address(folder: str) -> str:
    """Address at which the parent answers its workers, as gRPC spells it."""
    return f"unix:{Path(folder) / 'parent'}"


def settings_of_worker(settings: CoordinatorSettings, setup: WorkerSetup) -> CoordinatorSettings:
    """The settings with the shared port and this worker's share of the bounds.

    The shares of running and waiting requests add up to the bounds exactly; the others are rounded up.
    """
    count = settings.workers

    def rounded_up(bound: int) -> int:
        return -(-bound // count)

    per_peer = settings.max_streams_per_peer
    bodies = rounded_up(settings.http_max_held_body_bytes)
    return settings.model_copy(
        update={
            "workers": 1,
            "port": setup.port,
            # The parent serves it for all.
            "prometheus_port": None,
            "max_concurrent_requests": share(settings.max_concurrent_requests, setup.index, count),
            "max_queued_requests": share(settings.max_queued_requests, setup.index, count),
            "max_streams_per_peer": None if per_peer is None else rounded_up(per_peer),
            "max_concurrent_streams": rounded_up(settings.max_concurrent_streams),
            "http_max_connections": rounded_up(settings.http_max_connections),
            "http_max_held_body_bytes": max(bodies, settings.http_max_body_bytes),
            "http_max_held_answer_bytes": rounded_up(settings.http_max_held_answer_bytes),
        }
    )


def share(bound: int, index: int, count: int) -> int:
    """A worker's part of a bound; the parts of all add up to it."""
    return bound // count + (index < bound % count)
