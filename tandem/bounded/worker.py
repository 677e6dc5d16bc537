"""The process's side: reads jobs from stdin and writes an answer to stdout for each.

The operating system enforces the bounds, even within a single operation of Python or of a library: the kernel ends the
process when a job has used up its time, and refuses memory beyond the limit. The process ends when its stdin closes, so
it outlives its parent by one job at most.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

CPU_SECONDS = 2.0
"""Processor time of a job. A chat's prompt of 1 MiB in ten thousand messages takes some 50 ms."""
REAL_SECONDS = 30.0
"""Wall time of a job, for one that waits instead of computing, and for a busy machine."""
MEMORY_BYTES = 512 << 20
"""Bound on the address space of the process; an idle one uses some 40 MiB."""
LONGEST_REASON = 1000
"""Characters of a refusal or an error that a job may write."""


def read_message(stream: BinaryIO) -> Any:
    """The next message, a line of JSON; None at the end, be it in the middle of one."""
    line = stream.readline()
    return json.loads(line) if line.endswith(b"\n") else None


def write_message(stream: BinaryIO, message: Any) -> None:
    """Send a message."""
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


def work(answer: Callable[[Any], dict[str, Any]]) -> None:
    """Answer each message until stdin ends. An answer with `failed` says why there is none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    with suppress(ValueError, OSError):  # a stricter limit is there already, or the system knows none
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (job := read_message(sys.stdin.buffer)) is not None:
        _start_clock(CPU_SECONDS, REAL_SECONDS)
        try:
            found = answer(job)
        except MemoryError:
            found = {"failed": f"takes more than {MEMORY_BYTES >> 20} MiB"}
        except Exception as error:  # noqa: BLE001 - what strangers wrote may raise anything
            found = {"failed": f"fails: {str(error)[:LONGEST_REASON]}"}
        write_message(sys.stdout.buffer, found)
        _start_clock(0.0, 0.0)


def _start_clock(cpu_seconds: float, real_seconds: float) -> None:
    """Let the kernel end the process after so many seconds; 0: never. Both signals end it unless they are handled."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, real_seconds)
