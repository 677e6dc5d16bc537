"""The process that compiles and renders one chat template: `python -m coordinator.http.chat_worker`.

It reads jobs from stdin and writes an answer to stdout for each. The first job is the template's source. The operating
system enforces the bounds, even within a single operation of Python: the kernel ends the process when a job has used up
its time, and refuses memory beyond the limit. The process ends when its stdin closes, so it outlives the coordinator by
one job at most.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 2.0
"""Processor time of a job. A prompt of 1 MiB in ten thousand messages takes some 50 ms."""
REAL_SECONDS = 30.0
"""Wall time of a job, for one that waits instead of computing, and for a busy machine."""
MEMORY_BYTES = 512 << 20
"""Bound on the address space of the process; an idle one uses some 40 MiB."""
_LONGEST_REASON = 1000
"""Characters of a refusal or an error that a template may write."""


def read_message(stream: BinaryIO) -> Any:
    """The next message, a line of JSON; None at the end, be it in the middle of one."""
    line = stream.readline()
    return json.loads(line) if line.endswith(b"\n") else None


def write_message(stream: BinaryIO, message: Any) -> None:
    """Send a message."""
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}`, which marks the assistant's text for training. In a prompt it is
    an ordinary block with a scope of its own, as in transformers."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's content, as a call that returns its argument."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Any) -> Any:
        return caller()


def template_environment() -> ImmutableSandboxedEnvironment:
    """The environment for chat templates, as in transformers (`transformers.utils.chat_template_utils`, version 5.23).

    The sandbox lets a template neither reach Python nor change its input. It does not bound time or memory.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes what HTML would read as markup."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def main() -> None:
    """Work until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's business
    with suppress(ValueError, OSError):  # a stricter limit is there already, or the system knows none
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template: Template | None = None
    while (job := read_message(sys.stdin.buffer)) is not None:
        _start_clock(CPU_SECONDS, REAL_SECONDS)
        answer: dict[str, str | None] = {"text": ""}
        try:
            if template is None:
                template = template_environment().from_string(job["source"])
            else:
                answer = {"text": _rendered(template, job["context"], job["max_characters"])}
        except TemplateError as error:
            answer = {"failed": f"refuses: {str(error)[:_LONGEST_REASON]}"}
        except MemoryError:
            answer = {"failed": f"takes more than {MEMORY_BYTES >> 20} MiB"}
        except Exception as error:  # noqa: BLE001 - a template may raise anything for messages that it was not written for
            answer = {"failed": f"fails: {str(error)[:_LONGEST_REASON]}"}
        write_message(sys.stdout.buffer, answer)
        _start_clock(0.0, 0.0)


def _rendered(template: Template, context: dict[str, Any], max_characters: int) -> str | None:
    pieces, size = [], 0
    for piece in template.generate(context):
        pieces.append(piece)
        size += len(piece)
        if size > max_characters:
            return None
    return "".join(pieces)


def _start_clock(cpu_seconds: float, real_seconds: float) -> None:
    """Let the kernel end the process after so many seconds; 0: never. Both signals end it unless they are handled."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, real_seconds)


if __name__ == "__main__":
    main()
