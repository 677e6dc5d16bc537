"""The process that compiles and renders one chat template: `python -m coordinator.http.chat.worker`.

It reads jobs from stdin and writes an answer to stdout for each, both JSON behind eight bytes of length. The first job
is the template's source. The operating system enforces the bounds, even within a single operation of Python: the kernel
ends the process when a job has used up its time, and refuses memory beyond the limit. The process ends when its stdin
closes, so it outlives the coordinator by one job at most.
"""

from __future__ import annotations

import resource
import signal
import sys
from contextlib import suppress
from typing import Any

from jinja2 import Template, TemplateError

from coordinator.http.chat.environment import template_environment
from coordinator.http.chat.messages import (
    CPU_SECONDS,
    MEMORY_BYTES,
    REAL_SECONDS,
    read_message,
    write_message,
)

_LONGEST_REASON = 1000


def main() -> None:
    """Work until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's business
    with suppress(ValueError, OSError):  # a stricter limit is there already, or the system knows none
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template: Template | None = None
    while (job := read_message(sys.stdin.buffer)) is not None:
        _start_clock(CPU_SECONDS, REAL_SECONDS)
        try:
            if template is None:
                template = template_environment().from_string(job["source"])
                answer: dict[str, Any] = {}
            else:
                answer = _rendered(template, job["context"], job["most_characters"])
        except TemplateError as error:
            answer = {"refused": _reason(error)}
        except MemoryError:
            answer = {"exhausted": True}
        except Exception as error:  # noqa: BLE001 - a template may raise anything for messages that it was not written for
            answer = {"failed": _reason(error)}
        write_message(sys.stdout.buffer, answer)
        _start_clock(0.0, 0.0)


def _rendered(template: Template, context: dict[str, Any], most_characters: int) -> dict[str, Any]:
    pieces, size = [], 0
    for piece in template.generate(context):
        pieces.append(piece)
        size += len(piece)
        if size > most_characters:
            return {"too_long": True}
    return {"text": "".join(pieces)}


def _reason(error: Exception) -> str:
    return str(error)[:_LONGEST_REASON]


def _start_clock(cpu_seconds: float, real_seconds: float) -> None:
    """Let the kernel end the process after so many seconds; 0: never. Both signals end it unless they are handled."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, real_seconds)


if __name__ == "__main__":
    main()
