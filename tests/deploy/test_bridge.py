"""The name server of the containers' network, against the resolver of this machine's own kind of answer."""

from __future__ import annotations

import struct

import pytest

from tests.deploy.bridge import answer

NAMES = {"draft-service": ["10.77.0.2", "10.77.0.5"], "gone": []}


def query(name: str, kind: int) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack(">HHHHHH", 7, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", kind, 1)


@pytest.mark.parametrize(
    ("name", "kind", "code", "addresses"),
    [
        ("draft-service", 1, 0, [b"\x0a\x4d\x00\x02", b"\x0a\x4d\x00\x05"]),
        ("draft-service", 28, 0, []),
        ("gone", 1, 0, []),
        ("nobody", 1, 3, []),
    ],
)
def test_all_addresses_of_a_name(name: str, kind: int, code: int, addresses: list[bytes]) -> None:
    question = query(name, kind)
    response = answer(question, NAMES)
    number, flags, questions, answers, _, _ = struct.unpack(">HHHHHH", response[:12])
    assert (number, flags & 0xF, questions, answers) == (7, code, 1, len(addresses))
    assert response[12 : len(question)] == question[12:]
    assert [response[at : at + 4] for at in range(len(question) + 12, len(response), 16)] == addresses
