"""Addresses: host:port, and their properties."""

from __future__ import annotations

from tandem.serving.protection import is_loopback


def is_local(address: str) -> bool:
    """True if an address, host:port or unix:path, is on this machine."""
    return address.startswith("unix:") or is_loopback(address.rpartition(":")[0].strip("[]"))
