"""What all measurements share: services as processes on this machine, turns, ratios, lists on a command line."""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from benchmarks.peers import Outcome, Workload
from tandem.errors import ServiceUnavailableError

ItemT = TypeVar("ItemT")

CACHE_FOLDER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tandem" / "bench"
"""Default folder of shaped pairs."""
_READY = "ready on "
_STOP_SECONDS = 60.0


class Contender(Protocol):
    """A started way of decoding."""

    async def run(self, workload: Workload) -> Outcome:
        """Complete the workload's prompts, all at once.

        Raises:
            TandemError: it could not.
        """


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


def rotated(items: Sequence[ItemT], round_index: int) -> list[ItemT]:
    """The items, beginning with another one each round, so that after-effects of a run affect all of them."""
    start = round_index % max(len(items), 1)
    return [*items[start:], *items[:start]]


def chosen(items: Sequence[ItemT], count: int, round_index: int) -> tuple[ItemT, ...]:
    """The round's `count` items: the next ones each round, from the first again after the last."""
    return tuple(items[(round_index * count + index) % len(items)] for index in range(count))


async def in_turn(
    ways: Mapping[str, Contender],
    prompts: Sequence[tuple[int, ...]],
    batch: int,
    temperature: float,
    max_tokens: int,
    rounds: int,
    warm_up: int = 1,
) -> dict[str, list[Outcome]]:
    """Let all ways complete the same prompts in turn, so that a machine that slows down slows all of them.

    Args:
        ways: By name.
        prompts: Token ids; each round takes the next ones.
        batch: Requests at once.
        temperature: Of all requests.
        max_tokens: Of each completion.
        rounds: Rounds that count.
        warm_up: Rounds before them.

    Returns:
        Outcomes of the rounds that count, by way.
    """
    found: dict[str, list[Outcome]] = {name: [] for name in ways}
    for number in range(warm_up + rounds):
        workload = Workload(chosen(prompts, batch, number), temperature, max_tokens, seed=number)
        for name in rotated(list(ways), number):
            outcome = await ways[name].run(workload)
            if number >= warm_up:
                found[name].append(outcome)
    return found


def speed(outcomes: Sequence[Outcome]) -> float:
    """Median of tokens per second."""
    return statistics.median(outcome.tokens_per_second for outcome in outcomes)


def speed_ratio(outcomes: Sequence[Outcome], others: Sequence[Outcome]) -> float:
    """Median of the ratios within a round."""
    pairs = zip(outcomes, others, strict=True)
    return statistics.median(one.tokens_per_second / other.tokens_per_second for one, other in pairs)


def numbers(text: str) -> list[int]:
    """Whole numbers with commas between them."""
    return [int(part) for part in text.split(",")]


def floats(text: str) -> list[float]:
    """Numbers with commas between them."""
    return [float(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    """Words with commas between them."""
    return [part.strip() for part in text.split(",")]
