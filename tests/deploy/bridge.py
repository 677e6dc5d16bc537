"""The network of the containers: a bridge in a network namespace, and the DNS server that knows their names.

Run by itself with `unshare --net`, with the address of the bridge and a JSON file from names to lists of addresses,
which may change while this runs. Ends when its stdin does.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

_A, _IN, _ANSWER, _UNKNOWN = 1, 1, 0x8580, 0x8583
_SECONDS = 1


def answer(query: bytes, names: dict[str, list[str]]) -> bytes:
    """All addresses of the name that is asked for, each in a record of its own (RFC 1035, section 4)."""
    end, labels = 12, []
    while length := query[end]:
        labels.append(query[end + 1 : end + 1 + length].decode("ascii").lower())
        end += 1 + length
    question = query[12 : end + 5]
    (kind,) = struct.unpack(">H", query[end + 1 : end + 3])
    known = names.get(".".join(labels))
    addresses = known or [] if kind == _A else []
    flags = _UNKNOWN if known is None else _ANSWER
    records = b"".join(
        struct.pack(">HHHIH4s", 0xC00C, _A, _IN, _SECONDS, 4, socket.inet_aton(address))
        for address in addresses
    )
    return query[:2] + struct.pack(">HHHHH", flags, 1, len(addresses), 0, 0) + question + records


def serve(address: str, names: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((address, 53))
        sys.stdout.write("up\n")
        sys.stdout.flush()
        while True:
            query, peer = server.recvfrom(512)
            with suppress(OSError, IndexError, struct.error):  # who asked may be gone, or no resolver
                server.sendto(answer(query, json.loads(names.read_text(encoding="utf-8"))), peer)


def main(address: str, names: Path) -> None:
    commands = f"link add br0 type bridge\naddr add {address}/24 dev br0\nlink set br0 up\nlink set lo up"
    subprocess.run(["ip", "-batch", "-"], input=commands, text=True, check=True)
    threading.Thread(target=serve, args=(address, names), daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
