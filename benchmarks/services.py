"""Single services as processes on this machine, for what `tandem up` does not start."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
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
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", package, "--port", "0", "--log-level", "warning", *options),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            if _READY in line.decode():
                yield line.decode().partition(_READY)[2].strip()
                return
        raise ServiceUnavailableError(f"{package} did not start: exit code {await process.wait()}")
    finally:
        if process.returncode is None:
            process.terminate()
            await asyncio.wait_for(process.wait(), _STOP_SECONDS)
