"""The coordinator's end of the process that renders a chat template."""

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

from coordinator.http.chat.messages import (
    CPU_SECONDS,
    MEMORY_BYTES,
    REAL_SECONDS,
    read_message,
    write_message,
)
from tandem.errors import CapacityError

logger = logging.getLogger(__name__)

MOST_WAITING = 64
"""Chats that wait for their prompts, one being rendered at a time. Few: a published template takes milliseconds."""

_WORKER = "coordinator.http.chat.worker"
_KEPT_ENVIRONMENT = ("TZ", "LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME")
"""Environment variables for the process: the time zone and Python's paths, but no tokens."""
_REAL_SIGNAL = signal.SIGALRM
_CPU_SIGNAL = signal.SIGPROF


class RenderingError(Exception):
    """A template has no answer; the text completes "the template ..."."""


class TemplateTooLongError(RenderingError):
    """The rendered text is longer than allowed."""


class Renderer:
    """Compiles and renders one template in a process of its own, which is started again when a bound has ended it.

    Its one thread waits for the process, so the event loop never does.
    """

    def __init__(self, source: str) -> None:
        """A renderer for this template; its process starts later."""
        self._source = source
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tandem-chat")
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting = 0
        self._is_closed = False

    async def compile(self) -> None:
        """Start the process, and let it compile the template.

        Raises:
            RenderingError: it cannot.
        """
        await self._asked(None)

    async def render(self, context: dict[str, Any], most_characters: int) -> str:
        """The rendered text.

        Raises:
            RenderingError: the template fails, or takes too much time or memory.
            TemplateTooLongError: the text is longer than that.
            CapacityError: too many chats wait.
        """
        return await self._asked({"context": context, "most_characters": most_characters})

    def close(self) -> None:
        """End the process. A chat in progress gets no answer."""
        if self._is_closed:
            return
        self._is_closed = True
        self._thread.submit(self._end)
        self._thread.shutdown(wait=False)
        if self._process is not None:
            self._process.kill()

    async def _asked(self, job: dict[str, Any] | None) -> str:
        if self._waiting >= MOST_WAITING:
            raise CapacityError(f"{self._waiting} chats wait for their prompts; try again later")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._answered, job)
        finally:
            self._waiting -= 1

    # ---- on the thread

    def _answered(self, job: dict[str, Any] | None) -> str:
        if self._is_closed:
            raise RenderingError("is not rendered any more")
        try:
            if self._process is None or self._process.poll() is not None:
                self._end()
                self._compile()
            assert self._process is not None
            return "" if job is None else _text_of(self._exchanged(self._process, job))
        except _EndedError:
            raise RenderingError(_why(self._end())) from None

    def _compile(self) -> None:
        self._process = _started()
        try:
            _text_of(self._exchanged(self._process, {"source": self._source}))
        except RenderingError:
            self._end()
            raise

    @staticmethod
    def _exchanged(process: subprocess.Popen[bytes], message: Any) -> dict[str, Any]:
        try:
            write_message(cast(BinaryIO, process.stdin), message)
            answer = read_message(cast(BinaryIO, process.stdout))
        except OSError:
            answer = None
        if answer is None:
            raise _EndedError
        return cast(dict[str, Any], answer)

    def _end(self) -> int:
        """Close the process and return its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.kill()  # does nothing to one that has ended
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # unread input is lost
                cast(BinaryIO, pipe).close()
        return process.wait()


class _EndedError(Exception):
    """The process has ended instead of answering."""


def _started() -> subprocess.Popen[bytes]:
    kept = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
    # -P: the working directory is not trusted.
    command = [sys.executable, "-P", "-m", _WORKER]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=kept)


def _text_of(answer: dict[str, Any]) -> str:
    if "too_long" in answer:
        raise TemplateTooLongError("writes too much")
    if "refused" in answer:
        raise RenderingError(f"refuses: {answer['refused']}")
    if "failed" in answer:
        raise RenderingError(f"fails: {answer['failed']}")
    if "exhausted" in answer:
        raise RenderingError(f"takes more than {MEMORY_BYTES >> 20} MiB")
    return str(answer.get("text", ""))


def _why(exit_code: int) -> str:
    reason = {
        -_CPU_SIGNAL: f"takes more than {CPU_SECONDS:g} s",
        -_REAL_SIGNAL: f"was not done within {REAL_SECONDS:g} s",
    }.get(exit_code, f"ended its process with {exit_code}")
    logger.warning("the process of the chat template ended", extra={"reason": reason})
    return reason
