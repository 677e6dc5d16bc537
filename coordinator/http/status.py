"""The coordinator's status for the page: models, replicas, load, and speculation statistics."""

from __future__ import annotations

from typing import Any

from coordinator.stats.speculation import describe
from tandem.admin import Status
from tandem.replica import ReplicaSnapshot, Role


def status_object(status: Status, *, chat: bool) -> dict[str, Any]:
    """The coordinator's status as an object for JSON.

    Args:
        status: The coordinator's status.
        chat: Whether the model has a chat template.
    """
    settings = status.settings
    return {
        "version": status.version,
        "state": status.state.value,
        "uptime_seconds": round(status.uptime_seconds, 3),
        "model": status.model,
        "chat": chat,
        "load": {"running": status.load.running, "queued": status.load.queued},
        "tokens_per_second": round(status.throughput.last_10_seconds, 3),
        "speculation": {
            "is_on": settings.is_on,
            "num_speculative_tokens": settings.num_speculative_tokens,
            **describe(status.speculation),
            "state": status.speculation_state.as_dict(),
        },
        "replicas": [
            _replica(replica)
            for replica in sorted(status.replicas, key=lambda one: (one.role is not Role.TARGET, one.address))
        ],
    }


def _replica(replica: ReplicaSnapshot) -> dict[str, Any]:
    model = replica.model
    return {
        "role": replica.role.value,
        "address": replica.address,
        "state": replica.state.value,
        "reason": replica.reason,
        "since_seconds": round(replica.since_seconds, 3),
        "open_sequences": replica.open_sequences,
        "round_trip_seconds": replica.round_trip_seconds,
        "step_seconds": replica.step_seconds,
        "model": None
        if model is None
        else {
            "name": model.name,
            "architecture": model.architecture,
            "parameter_count": model.parameter_count,
            "dtype": model.dtype,
        },
    }
