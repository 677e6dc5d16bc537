"""What is known of a replica: see `tandem.replica`, where clients find it too."""

from tandem.replica import ReplicaSnapshot, ReplicaState, Role

__all__ = ["ReplicaSnapshot", "ReplicaState", "Role"]
