"""`tandem up`: all three services on this machine, as child processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.serve import SERVICES
from coordinator.settings import DEFAULT_PORT
from tandem.errors import ConfigurationError, ServiceUnavailableError, TandemError
from tandem.settings import exit_with

DEMO_MODELS = Path(__file__).resolve().parents[2] / "models" / "demo"

_LOOPBACK = ("--host", "127.0.0.1")
_HTTP_LOOPBACK = ("--http-host", "127.0.0.1")

# A child is asked to stop, and given its drain timeout (30 s unless set) and this much more before it is killed.
_STOP_SECONDS = 40.0


def up(
    target: Annotated[
        Path | None, typer.Option(help="Folder of the target model. [default: the demo pair's]")
    ] = None,
    draft: Annotated[
        Path | None, typer.Option(help="Folder of the draft model. [default: the demo pair's]")
    ] = None,
    device: Annotated[str, typer.Option(help="Where both models run: cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. [default: each service's]")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of each model. [default: each service's]")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Most tokens of a sequence. [default: the models']")
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the coordinator; 0 takes any free one.")] = DEFAULT_PORT,
    http_port: Annotated[
        int | None, typer.Option(help="Port for HTTP as well: OpenAI's API and a page; 0 takes any free one.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
) -> None:
    """Start a draft service, a target service and a coordinator here; stop them all with Ctrl-C.

    A service's other options are read from its environment: TANDEM_TARGET_..., TANDEM_DRAFT_..., TANDEM_COORDINATOR_...
    """
    if (target is None) != (draft is None):
        exit_with(
            ConfigurationError("--target and --draft go together: give both, or neither for the demo pair"), 2
        )
    # Draft and target take turns, but the waiting threads of one would still spin on the other's cores.
    threads = threads or max(1, len(os.sched_getaffinity(0)) // 2)
    shared = _options(device=device, dtype=dtype, threads=threads, max_length=max_length, log_level=log_level)
    cluster = _Cluster(
        # Whatever the environment says: this command serves this machine alone.
        target=[*_LOOPBACK, "--model", str(target or DEMO_MODELS / "target"), "--port", "0", *shared],
        draft=[*_LOOPBACK, "--model", str(draft or DEMO_MODELS / "draft"), "--port", "0", *shared],
        coordinator=[
            *_LOOPBACK,
            *_HTTP_LOOPBACK,
            *_options(port=port, http_port=http_port, log_level=log_level),
        ],
    )
    try:
        asyncio.run(cluster.run())
    except TandemError as error:
        exit_with(error, 1)


def _options(**values: object) -> list[str]:
    """Command-line options for those that are set."""
    return [
        word
        for name, value in values.items()
        if value is not None
        for word in ("--" + name.replace("_", "-"), str(value))
    ]


class _Cluster:
    def __init__(self, target: Sequence[str], draft: Sequence[str], coordinator: Sequence[str]) -> None:
        self._target = target
        self._draft = draft
        self._coordinator = coordinator

    async def run(self) -> None:
        """Run until a signal, or until a child ends by itself.

        Raises:
            ServiceUnavailableError: a child ended by itself.
        """
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
        work = asyncio.create_task(self._serve())
        stop = asyncio.create_task(stopping.wait())
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if work.done():
            work.result()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    async def _ready(self, coordinator: _Child) -> list[str]:
        """Where it answers, once it does: over HTTP where it does, and by gRPC."""
        marks = ["http on "] if "--http-port" in self._coordinator else []
        # In the order in which it says so.
        return [mark + await coordinator.line(mark) for mark in (*marks, "ready on ")]

    async def _serve(self) -> None:
        # The stack ends the coordinator first: it drains while the models still answer it.
        async with AsyncExitStack() as stack:
            target = await stack.enter_async_context(_child("target", self._target))
            draft = await stack.enter_async_context(_child("draft", self._draft))
            addresses = [
                *("--target-address", await target.line("listening on ")),
                *("--draft-address", await draft.line("listening on ")),
            ]
            coordinator = await stack.enter_async_context(
                _child("coordinator", [*self._coordinator, *addresses])
            )
            children = (target, draft, coordinator)
            ends = [asyncio.create_task(child.end()) for child in children]
            ready = asyncio.create_task(self._ready(coordinator))
            await asyncio.wait({*ends, ready}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done() and ready.exception() is None:
                for line in ready.result():
                    _tell(f"tandem up: {line}")
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            ready.cancel()
            ended = next(
                child for child, end in zip(children, ends, strict=True) if end.done() or child is coordinator
            )
            for end in ends:
                end.cancel()
            raise ServiceUnavailableError(f"{await ended.obituary()}; the other services were stopped")


class _Child:
    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process

    async def line(self, mark: str) -> str:
        """What follows the mark in the first line of its stdout that has it.

        Raises:
            ServiceUnavailableError: it ended without such a line.
        """
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            _, found, rest = line.decode().partition(mark)
            if found:
                return rest.strip()
        raise ServiceUnavailableError(await self.obituary())

    async def end(self) -> None:
        """Return when the process has ended."""
        await self.process.wait()

    async def obituary(self) -> str:
        """How it ended, in words."""
        code = await self.process.wait()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the {self.name} service {how}"

    async def stop(self) -> None:
        """Ask it to stop, and kill it when it does not."""
        if self.process.returncode is not None:
            return
        self.process.terminate()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


@asynccontextmanager
async def _child(name: str, arguments: Sequence[str]) -> AsyncIterator[_Child]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        SERVICES[name],
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        # Its own session: Ctrl-C reaches this process alone, which then stops the children in order.
        start_new_session=True,
    )
    child = _Child(name, process)
    try:
        yield child
    finally:
        await asyncio.shield(child.stop())


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
