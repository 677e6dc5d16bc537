"""Starts services quickly: real processes that share nothing but their imports.

Most of a service's start is the import of torch, or of gRPC. This process does it once, and forks for each service: a
test can then end a hundred of them without waiting for minutes. Run as `python -m tests.end_to_end.nursery FOLDER`.

Each line of stdin is a JSON list: the folder for the service's output, its environment, package and arguments. Each is
answered with the process's id on stdout, and the service begins once the file `begin` is in its folder. Exit codes come
into files `ended-PID` of FOLDER. At the end of stdin the nursery ends with all its services.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import tandem_coordinator  # noqa: F401 - first: it says what gRPC is to read from the environment
from tandem.serving.server import STARTING_OBJECTS
from tests.end_to_end import stand_in
from tests.end_to_end.processes import WARM_UP_SECONDS, descendants

_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""
_OF_VLLM = (
    "tandem.engine_vllm.engine",
    "vllm.engine.arg_utils",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)
"""With them imported a service with the engine vllm loads a small model in two seconds instead of twenty."""


def main() -> None:
    """Serve the lines of stdin."""
    gc.set_threshold(STARTING_OBJECTS)
    starts = _starts()
    # Each child collects its garbage at startup; freezing keeps the shared objects out of that.
    gc.freeze()
    running: dict[int, int] = {}
    """Process ids by descriptors of the processes, which can be read from once they have ended."""
    while True:
        changed = select.select([sys.stdin, *running], [], [])[0]
        for descriptor in running.keys() & set(changed):
            os.close(descriptor)
            _note_end(Path(sys.argv[1]), running.pop(descriptor))
        if sys.stdin not in changed:
            continue
        # Nothing is left in the buffer: each line is answered before the next comes.
        line = sys.stdin.readline()
        if not line:
            break
        folder, environment, package, *arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.environ.update(environment)
            _become(Path(folder), partial(starts[package], arguments))
        running[os.pidfd_open(pid)] = pid
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
    for pid in descendants(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _note_end(folder: Path, pid: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(FileNotFoundError):  # at the end of the tests the folder may go first
        (folder / "part").write_text(str(code))
        (folder / "part").rename(folder / f"ended-{pid}")


def _starts() -> dict[str, Callable[[list[str]], None]]:
    """Import everything that the services need, and return the function that runs each."""
    has_vllm = importlib.util.find_spec("vllm") is not None
    if has_vllm:
        from tandem.engine_vllm.adapter import prepare_process

        prepare_process(1, "cpu", 1)  # before torch is imported
    import torch

    import benchmarks.pace
    import tandem_coordinator.__main__
    import tandem_coordinator.cli.main
    import tandem_draft.__main__
    import tandem_load.fakes
    import tandem_target.__main__
    from tandem.engine.core import engine

    for module in (
        "tandem_draft.proposers.standalone",
        "tandem_target.verifier",
        "tandem_coordinator.http.app",
        "tandem_coordinator.http.server",
        *(_OF_VLLM if has_vllm else ()),
    ):
        importlib.import_module(module)
    engine.WARM_UP_SECONDS = WARM_UP_SECONDS
    # Threads do not survive a fork, so there must be none yet.
    torch.set_num_threads(1)
    return {
        "tandem_coordinator": tandem_coordinator.__main__.run,
        "tandem_draft": tandem_draft.__main__.run,
        "stand_in": stand_in.tandem,
        "tandem": _command(tandem_coordinator.cli.main.main),
        "tandem_target": tandem_target.__main__.run,
        "tandem_load.fakes": tandem_load.fakes.main,
        "benchmarks.pace": benchmarks.pace.main,
    }


def _command(main: Callable[[], None]) -> Callable[[list[str]], None]:
    def run(arguments: list[str]) -> None:
        sys.argv = ["tandem", *arguments]
        main()

    return run


def _become(folder: Path, start: Callable[[], None]) -> None:
    """Become that service, which ends with the nursery."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    while not (folder / "begin").exists():
        time.sleep(0.001)
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = 0
    try:
        start()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - as the interpreter ends
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
