"""Services as processes on this machine: single ones, or all three by `tandem up`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tandem.errors import ServiceUnavailableError

_READY = "ready on "
_STOP_SECONDS = 60.0


@asynccontextmanager
async def service(package: str, *options: str) -> AsyncIterator[str]:
    """Run a service on a free port with these options; its address.

    Raises:
        ServiceUnavailableError: it ended before it was ready.
    """
    async with process(package, *options) as (address, _):
        yield address


@asynccontextmanager
async def process(package: str, *options: str) -> AsyncIterator[tuple[str, int]]:
    """Run a service like `service`; its address and the number of its process.

    Raises:
        ServiceUnavailableError: it ended before it was ready.
    """
    command = ["-P", "-m", package, "--port", "0", "--log-level", "warning", *options]
    async with _running(package, command) as running:
        yield running


@asynccontextmanager
async def cluster(*options: str) -> AsyncIterator[str]:
    """Run `tandem up` on a free port with these options; the coordinator's address.

    Raises:
        ServiceUnavailableError: it ended before it was ready.
    """
    command = ["-P", "-m", "coordinator.cli", "up", "--port", "0", *options]
    async with _running("the cluster", command) as (address, _):
        yield address


@asynccontextmanager
async def _running(name: str, command: Sequence[str]) -> AsyncIterator[tuple[str, int]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            _, found, address = line.decode().partition(_READY)
            if found:
                yield address.strip(), process.pid
                return
        raise ServiceUnavailableError(f"{name} did not start: exit code {await process.wait()}")
    finally:
        if process.returncode is None:
            process.terminate()
            await asyncio.wait_for(process.wait(), _STOP_SECONDS)
