"""host:port, and what can be told of it."""

from __future__ import annotations

from tandem.serving.protection import is_loopback


def is_local(address: str) -> bool:
    """Whether an address, host:port or unix:path, is on this machine."""
    return address.startswith("unix:") or is_loopback(address.rpartition(":")[0].strip("[]"))
