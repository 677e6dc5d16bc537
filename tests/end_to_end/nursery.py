"""Starts short-lived services quickly: real processes that share nothing but their imports.

Most of a model service's start is the import of torch. This process does it once, and forks for each service: a test
can then end a hundred of them without waiting for minutes. Run as `python -m tests.end_to_end.nursery`.

Each line of stdin is a JSON list: the folder for the service's output, its package and its arguments. Each is answered
with the process's id on stdout. At the end of stdin the nursery ends with all its services.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from tests.end_to_end.processes import descendants


def main() -> None:
    """Serve the lines of stdin."""
    starts = _starts()
    # Each child collects its garbage at startup; freezing keeps the shared objects out of that.
    gc.freeze()
    # Nobody waits for ended children.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        folder, package, *arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(Path(folder), partial(starts[package], arguments))
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
    for pid in descendants(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _starts() -> dict[str, Callable[[list[str]], None]]:
    """Import everything that the services need, and return the function that runs each."""
    import torch

    import benchmarks.pace
    import coordinator.__main__
    import draft_service.__main__
    import target_service.__main__

    for module in ("draft_service.proposers.standalone", "target_service.verifier"):
        importlib.import_module(module)
    # Threads do not survive a fork, so there must be none yet.
    torch.set_num_threads(1)
    return {
        "coordinator": coordinator.__main__.run,
        "draft_service": draft_service.__main__.run,
        "target_service": target_service.__main__.run,
        "benchmarks.pace": benchmarks.pace.main,
    }


def _become(folder: Path, start: Callable[[], None]) -> None:
    """Become that service."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = 0
    try:
        start()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
