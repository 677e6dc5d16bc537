"""Messages between the coordinator and the process that renders a chat template, and the bounds of one job."""

from __future__ import annotations

import json
from typing import Any, BinaryIO

CPU_SECONDS = 2.0
"""Processor time of a job. A prompt of 1 MiB in ten thousand messages takes some 50 ms."""
REAL_SECONDS = 30.0
"""Wall time of a job, for one that waits instead of computing, and for a busy machine."""
MEMORY_BYTES = 512 << 20
"""Bound on the address space of the process; an idle one uses some 40 MiB."""
LENGTH_BYTES = 8


def read_message(stream: BinaryIO) -> Any:
    """The next message; None at the end, be it in the middle of one."""
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    size = int.from_bytes(head, "little")
    content = stream.read(size)
    return json.loads(content) if len(content) == size else None


def write_message(stream: BinaryIO, message: Any) -> None:
    """Send a message."""
    content = json.dumps(message).encode()
    stream.write(len(content).to_bytes(LENGTH_BYTES, "little") + content)
    stream.flush()
