"""A process that this one starts and stops, and that ends with it (`tandem.serving.supervised`)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

from tandem.errors import ServiceUnavailableError


class Child:
    """A process whose stdout this one reads."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, stop_seconds: float) -> None:
        self.name = name
        self.process = process
        self._stop_seconds = stop_seconds

    @classmethod
    async def start(
        cls, name: str, package: str, arguments: Sequence[str], stop_seconds: float, **options: Any
    ) -> Child:
        """Run `python -m PACKAGE` with these arguments; `options` are those of `create_subprocess_exec`."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # otherwise Python would import files from the working directory
            *("-m", "tandem.serving.supervised", str(os.getpid()), package, *arguments),
            # Never written to: when this process ends, the pipe closes, which the child notices.
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # A session of its own: Ctrl-C reaches only this process, which then stops the children in order.
            start_new_session=True,
            **options,
        )
        return cls(name, process, stop_seconds)

    async def line(self, mark: str) -> str:
        """Text after the mark in the first line of stdout that has it."""
        async for line in self.lines():
            _, found, rest = line.partition(mark)
            if found:
                return rest.strip()
        raise ServiceUnavailableError(await self.obituary())

    async def lines(self) -> AsyncIterator[str]:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            yield line.decode().rstrip()

    async def obituary(self) -> str:
        code = await self.process.wait()
        if code == -signal.SIGILL:
            return (
                f"the {self.name} service was ended by SIGILL: a kernel used an instruction that this CPU lacks or the "
                "system does not allow; try --dtype float32"
            )
        if code < 0:
            number = -code
            # Most real-time signals have no name.
            name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            return f"the {self.name} service was ended by {name}"
        return f"the {self.name} service ended with exit code {code}"

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        # Not by `Process.send_signal`: it takes the exit code of one that has just ended from asyncio, which then
        # writes a warning to stderr and reports 255.
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    async def stop(self) -> None:
        if self.process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._stop_seconds):
                await self.process.wait()
        except TimeoutError:
            self.kill()
            await self.process.wait()
