"""A whole cluster on this machine, started by its own command and stopped when the block ends."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tandem.errors import ServiceUnavailableError

_READY = "ready on "
_STOP_SECONDS = 60.0


@asynccontextmanager
async def cluster(*options: str) -> AsyncIterator[str]:
    """Run `tandem up` on a free port with these options; the coordinator's address.

    Raises:
        ServiceUnavailableError: it ended before it was ready.
    """
    process = await asyncio.create_subprocess_exec(
        *_command(options), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode()
        if _READY not in line:
            raise ServiceUnavailableError(f"the cluster did not start: exit code {await process.wait()}")
        yield line.partition(_READY)[2].strip()
    finally:
        if process.returncode is None:
            process.terminate()
            await asyncio.wait_for(process.wait(), _STOP_SECONDS)


def _command(options: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "coordinator.cli", "up", "--port", "0", *options]
