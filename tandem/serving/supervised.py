"""`python -m tandem.serving.supervised PARENT_PID PACKAGE ...`: runs a package that ends with the parent process.

The parent holds the other end of this process's stdin and never writes to it. The kernel closes the pipe when the
parent ends, however that happens, so the end of stdin means that the parent is gone. On Linux the kernel also kills
the process, even while Python cannot run because a library holds the interpreter lock.

This module imports only the standard library, so that it works from the very start.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading


def main() -> None:
    """Guard this process, then become the package."""
    parent, package, *arguments = sys.argv[1:]
    _die_with(int(parent))
    threading.Thread(target=_end_at_end_of_stdin, name="tandem-parent", daemon=True).start()
    sys.argv = [package, *arguments]
    runpy.run_module(package, run_name="__main__", alter_sys=True)


def _die_with(parent: int) -> None:
    if sys.platform != "linux":
        return
    # PR_SET_PDEATHSIG: the kernel sends the signal when the parent's *thread* that started this process ends
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call to prctl
        _end()


def _end_at_end_of_stdin() -> None:
    while os.read(0, 1024):
        pass
    _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
