"""The yardstick's end of the pipe to a peer."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.workload import Outcome, Workload
from tandem.errors import TandemError

ROOT = Path(__file__).resolve().parents[2]

_LINE_LIMIT_BYTES = 64 << 20
_START_SECONDS = 900.0
"""vLLM compiles its models at start, which takes minutes."""
_RUN_SECONDS = 600.0
_STOP_SECONDS = 20.0


class PeerError(TandemError):
    """A peer could not start, or could not run a workload."""


class Peer:
    """Another way to complete prompts, in a process of its own."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process

    async def run(self, workload: Workload) -> Outcome:
        """Complete the workload's prompts.

        Raises:
            PeerError: it could not, or ended.
        """
        return Outcome.from_json(await self.ask(workload.to_json(), _RUN_SECONDS))

    async def ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a line and read one.

        Raises:
            PeerError: it answered with an error, ended, or took too long.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            async with asyncio.timeout(seconds):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise PeerError(f"{self._name} did not answer within {seconds:g} s") from None
        if not line:
            raise PeerError(f"{self._name} ended with exit code {await self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self._name}: {answer['error']}")
        return answer


@asynccontextmanager
async def peer(name: str, python: str, module: str, setup: dict[str, Any], log: Path) -> AsyncIterator[Peer]:
    """Run a module of `benchmarks.peers` with an interpreter; what it writes to stderr goes to a file.

    Raises:
        PeerError: it did not start; the last line that it wrote is part of the sentence.
    """
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *(python, "-m", f"benchmarks.peers.{module}"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
            limit=_LINE_LIMIT_BYTES,
        )
        try:
            running = Peer(name, process)
            await running.ask(setup, _START_SECONDS)
            yield running
        finally:
            await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
