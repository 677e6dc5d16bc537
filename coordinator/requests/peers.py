"""How many streams each client address may have, stalled ones included."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote

from tandem.errors import CapacityError

_RETRY_SECONDS = 1.0
_IPV6_PREFIX = 64
"""A client with one IPv6 address controls a network of this size."""


class Peers:
    """Counts the streams of each client address."""

    def __init__(self, max_streams: int) -> None:
        self._max_streams = max_streams
        self._streams: Counter[str] = Counter()

    @contextmanager
    def stream(self, peer: str) -> Iterator[None]:
        """Count a stream of this peer for as long as the block lasts.

        Args:
            peer: Its address from `peer_of_grpc` or `peer_of_host`; empty: unknown, and not bounded.

        Raises:
            CapacityError: it has the maximum already.
        """
        if not peer:
            yield
            return
        if self._streams[peer] >= self._max_streams:
            raise CapacityError(
                f"{self._max_streams} requests from {peer} run, wait or are not read, which is the most for one "
                "address; try again later",
                _RETRY_SECONDS,
            )
        self._streams[peer] += 1
        try:
            yield
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]


def peer_of_grpc(peer: str) -> str:
    """The address in gRPC's name of a peer, which is such as `ipv4:127.0.0.1:5000` or `ipv6:%5B::1%5D:5000`."""
    kind, _, address = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    return peer_of_host(unquote(address).rpartition(":")[0].strip("[]"))


def peer_of_host(host: str) -> str:
    """The address by which the streams of a host are counted: its own, or the network of its IPv6 address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    if address.is_loopback:
        return str(address)
    return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))
