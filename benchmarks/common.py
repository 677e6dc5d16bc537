"""What benchmarks share: services as processes, turns, command lines, and tables in Markdown."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from tandem.errors import ServiceUnavailableError
from tandem.standard_streams import write_out

if TYPE_CHECKING:
    from benchmarks.peers import Outcome, Workload

ItemT = TypeVar("ItemT")

CACHE_FOLDER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tandem" / "bench"
"""Default folder of shaped pairs."""
_READY = "ready on "


class Contender(Protocol):
    """A started way of decoding."""

    async def run(self, workload: Workload) -> Outcome:
        """Complete the workload's prompts, all at once.

        Raises:
            TandemError: it could not.
        """


@asynccontextmanager
async def process(package: str, *options: str, port: int = 0) -> AsyncIterator[tuple[str, int]]:
    """Run a service that logs warnings, by default on a free port; its address and its process id.

    Raises:
        ServiceUnavailableError: it ended before it was ready.
    """
    command = ("-P", "-m", package, *options, "--port", str(port), "--log-level", "warning")
    started = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    assert started.stdout is not None
    try:
        async for line in started.stdout:
            _, found, address = line.decode().partition(_READY)
            if found:
                yield address.strip(), started.pid
                return
        raise ServiceUnavailableError(f"{package} did not start: exit code {await started.wait()}")
    finally:
        if started.returncode is None:
            started.terminate()
            # Longer than a service takes to drain
            await asyncio.wait_for(started.wait(), 60.0)


@asynccontextmanager
async def service(package: str, *options: str) -> AsyncIterator[str]:
    """Run a service on a free port; its address.

    Raises:
        ServiceUnavailableError: it ended before it was ready.
    """
    async with process(package, *options) as (address, _):
        yield address


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def rotated(items: Sequence[ItemT], round_index: int) -> list[ItemT]:
    """The items, beginning with another one each round, so that after-effects of a run affect all of them."""
    start = round_index % max(len(items), 1)
    return [*items[start:], *items[:start]]


def chosen(items: Sequence[ItemT], count: int, round_index: int) -> tuple[ItemT, ...]:
    """The round's `count` items: the next ones each round, from the first again after the last."""
    return tuple(items[(round_index * count + index) % len(items)] for index in range(count))


def numbers(text: str) -> list[int]:
    """Integers separated by commas."""
    return [int(part) for part in text.split(",")]


def floats(text: str) -> list[float]:
    """Numbers separated by commas."""
    return [float(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    """Words separated by commas."""
    return [part.strip() for part in text.split(",")]


def study_parser(description: str | None) -> argparse.ArgumentParser:
    """The command line of a study, described as it is written in its module."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def markdown_head(*columns: str) -> None:
    """Print the head of a table in Markdown."""
    markdown_row(*columns)
    write_out(f"{'|---' * len(columns)}|\n")


def markdown_row(*cells: object) -> None:
    """Print a row of a table in Markdown."""
    write_out(f"| {' | '.join(map(str, cells))} |\n")
