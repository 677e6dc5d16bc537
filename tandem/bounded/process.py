"""The parent's side: one process for one kind of job, started at its first job and again when a bound has ended it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, BinaryIO, cast

from tandem.bounded.worker import CPU_SECONDS, REAL_SECONDS, read_message, write_message

logger = logging.getLogger(__name__)

_KEPT_ENVIRONMENT = ("TZ", "LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME")
"""Environment variables for the process: the time zone and Python's paths, but no tokens."""


class JobError(Exception):
    """A job has no answer; the text completes "it ..."."""


class BoundedProcess:
    """A process that answers jobs, one at a time. One thread waits for it, so the event loop never does; `close` ends
    both. Its users bound how many jobs wait: whoever has one counts as a request that runs or waits."""

    def __init__(self, module: str, first: Any = None) -> None:
        """`module` is what it runs (see `tandem.bounded.worker.work`); `first` is a message before all others, without
        which the process is of no use."""
        self._module = module
        self._first = first
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=module.rpartition(".")[2])
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    async def answer(self, job: Any) -> dict[str, Any]:
        """The answer to a job; None only starts the process. A JobError says why there is none."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._answer, job)

    def close(self) -> None:
        """End the process. A job in progress gets no answer."""
        if self._is_closed:
            return
        self._is_closed = True
        process = self._process  # the thread may set it to None at any moment
        if process is not None:
            process.kill()
        self._thread.submit(self._end)
        self._thread.shutdown(wait=False)

    # ---- on the thread

    def _answer(self, job: Any) -> dict[str, Any]:
        if self._is_closed:
            raise JobError("is not done any more")
        if self._process is None or self._process.poll() is not None:
            self._start()
        return {} if job is None else self._exchange(job)

    def _start(self) -> None:
        self._end()
        kept = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
        # -P: the working directory is not trusted.
        command = [sys.executable, "-P", "-m", self._module]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=kept)
        if self._first is None:
            return
        try:
            self._exchange(self._first)
        except JobError:
            self._end()
            raise

    def _exchange(self, message: Any) -> dict[str, Any]:
        process = cast("subprocess.Popen[bytes]", self._process)
        try:
            write_message(cast(BinaryIO, process.stdin), message)
            answer = read_message(cast(BinaryIO, process.stdout))
        except OSError:
            answer = None
        if answer is None:
            exit_code = self._end()
            reason = {
                -signal.SIGPROF: f"takes more than {CPU_SECONDS:g} s",
                -signal.SIGALRM: f"was not done within {REAL_SECONDS:g} s",
            }.get(exit_code, f"ended its process with {exit_code}")
            logger.warning("a bounded process ended", extra={"module_name": self._module, "reason": reason})
            raise JobError(reason)
        if "failed" in answer:
            raise JobError(answer["failed"])
        return cast("dict[str, Any]", answer)

    def _end(self) -> int:
        process = self._process
        self._process = None
        if process is None:
            return 0
        process.kill()  # does nothing to one that has ended
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # unread input is lost
                cast(BinaryIO, pipe).close()
        return process.wait()
