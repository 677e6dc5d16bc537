"""The clients that count as one peer."""

from __future__ import annotations

import pytest

from coordinator.requests.peers import peer_of_grpc, peer_of_host


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:192.0.2.7:5000", "192.0.2.7"),
        ("ipv6:%5B::1%5D:5000", "::1"),
        ("ipv6:%5B2001:db8::1:2:3:4%5D:5000", "2001:db8::/64"),
        ("ipv6:%5B::ffff:192.0.2.7%5D:5000", "192.0.2.7"),
        ("ipv6:%5Bfe80::1%25eth0%5D:5000", "fe80::/64"),
        ("unix:/tmp/socket", "unix:/tmp/socket"),
    ],
)
def test_the_peer_of_a_grpc_call_is_its_host(peer: str, address: str) -> None:
    assert peer_of_grpc(peer) == address


def test_a_host_name_is_its_own_peer() -> None:
    assert peer_of_host("192.0.2.7") == "192.0.2.7"
    assert peer_of_host("somewhere") == "somewhere"
