"""Shared by benchmarks: services as processes, turns, command lines, and tables in Markdown."""

from __future__ import annotations

import math
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BeforeValidator, Field
from pydantic_settings import CliVariadicArg

from tandem.config.settings import FilledSettings
from tandem.errors import TandemError
from tandem.serving.children import Child
from tandem.serving.standard_streams import exit_with, write_out
from tandem_coordinator.cli.main import exit_code

ItemT = TypeVar("ItemT")

CACHE_FOLDER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tandem" / "bench"
"""Default folder of shaped pairs."""


@asynccontextmanager
async def process(package: str, *options: str, port: int = 0) -> AsyncIterator[tuple[str, int]]:
    """Run a service that logs warnings, by default on a free port; its address and its process id."""
    words = (*options, "--port", str(port), "--log-level", "warning")
    # Longer than a service takes to drain
    child = await Child.start(package, package, words, stop_seconds=60.0)
    try:
        yield await child.line("ready on "), child.process.pid
    finally:
        await child.stop()


@asynccontextmanager
async def service(package: str, *options: str) -> AsyncIterator[str]:
    """Run a service on a free port; its address."""
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


def bisect(
    rising: Callable[[float], float], wanted: float, low: float, high: float, within: float = 0.0
) -> float:
    """Argument at which a rising function comes closest to a value, by bisection on a logarithmic scale; it ends when
    the value is as near as wanted, or the interval so narrow."""
    best = 1.0
    distance = math.inf
    while distance > within and high / low > 1.001:
        middle = math.sqrt(low * high)
        reached = rising(middle)
        if abs(reached - wanted) < distance:
            best = middle
            distance = abs(reached - wanted)
        low, high = (middle, high) if reached < wanted else (low, middle)
    return best


def print_row(*cells: object) -> None:
    """Print a row of a table in Markdown."""
    write_out(f"| {' | '.join(map(str, cells))} |\n")


# ---- command lines


def _listed(value: Any) -> Any:
    words = [value] if isinstance(value, str) else value
    return [part for word in words for part in (word.split(",") if isinstance(word, str) else [word])]


Listed = CliVariadicArg[Annotated[tuple[ItemT, ...], BeforeValidator(_listed), Field(min_length=1)]]
"""Several values, with commas or spaces between them."""
Positive = Annotated[int, Field(ge=1)]


@contextmanager
def one_sentence() -> Iterator[None]:
    """End the process with one sentence where an error of Tandem's would be a traceback."""
    try:
        yield
    except TandemError as error:
        exit_with(error, exit_code(error))
    except KeyboardInterrupt:
        sys.exit(130)


class StudySettings(FilledSettings):
    """Options of a measurement that is a command of its own. What measurements start has other variables, since it gets
    their environment."""

    env_prefix: ClassVar = "TANDEM_STUDY_"

    @classmethod
    def about(cls) -> str:
        """Text of the module, which shows how the command is called."""
        return sys.modules[cls.__module__].__doc__ or ""
