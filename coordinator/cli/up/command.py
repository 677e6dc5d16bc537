"""`tandem up`: all three services on this machine, as child processes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.command import errors_to_exit
from coordinator.cli.serve import package_of
from coordinator.cli.up.arguments import (
    DTYPES,
    ServiceArguments,
    UpOptions,
    next_command,
    service_arguments,
)
from coordinator.cli.up.devices import DRAFT_SHARE, HTTP_PORT, TARGET_SHARE, DeviceOptions
from coordinator.settings.coordinator import DEFAULT_PORT
from tandem.config.devices import DEVICES
from tandem.errors import ServiceUnavailableError, TandemError
from tandem.serving.server import announce
from tandem.serving.signals import stop_signals
from tandem.settings import exit_with

# Seconds for a child to stop before it is killed. Its drain takes up to 30 s of them by default.
_STOP_SECONDS = 40.0


def up(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="demo|smollm2|DIR|ID",
            help="Model to serve: the bundled pair, SmolLM2-135M-Instruct, a folder or a Hugging Face id. "
            "[default: demo]",
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="smollm2|DIR|ID", help="Another name for --model.")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="ngram|suffix|none|DIR|ID",
            help="Draft: ngram or suffix need no model, none leaves the target alone, a folder or id is a model with "
            "the target's tokenizer, or a drafting head for it. [default: the demo pair's; for smollm2 its head; for "
            "another model, suffix]",
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="Drafting method. eagle, eagle3, medusa: a head beside the target. [default: by the draft's name]"
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(help="Maximum tokens proposed per verification. [default: the coordinator's]"),
    ] = None,
    draft_ahead: Annotated[
        str | None,
        typer.Option(
            metavar="auto|off|NUMBER",
            help="Outcomes of each verification to draft ahead for. [default: the coordinator's, auto]",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help=f"Where both models run: {DEVICES}.")] = "cpu",
    target_device: Annotated[
        str | None, typer.Option(help="Where the target runs. [default: that of --device]")
    ] = None,
    draft_device: Annotated[
        str | None,
        typer.Option(
            "--draft-device", "--draft-devices", help="Where the draft runs. [default: that of --device]"
        ),
    ] = None,
    target_memory_utilization: Annotated[
        float | None,
        typer.Option(
            help="Share of its device's memory that the target takes. "
            f"[default: the service's, or {TARGET_SHARE:g} beside the draft on one GPU]"
        ),
    ] = None,
    draft_memory_utilization: Annotated[
        float | None,
        typer.Option(
            help="Share of its device's memory that the draft takes. "
            f"[default: the service's, or {DRAFT_SHARE:g} beside the target on one GPU]"
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES)}. [default: each service's]")] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of each model. [default: half of the cores]")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Maximum tokens of a sequence. [default: the models']")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file for chats. [default: the model's own]")
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option(help="TOML, YAML or JSON file for coordinator and draft.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the coordinator; 0 takes any free one.")] = DEFAULT_PORT,
    http_port: Annotated[
        int | None,
        typer.Option(
            help=f"Port for HTTP: OpenAI's API and a page; 0 takes any free one. "
            f"[default: {HTTP_PORT}, or a free one where it is taken]"
        ),
    ] = None,
    http: Annotated[bool, typer.Option(help="Serve HTTP.")] = True,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
) -> None:
    """Start a draft service, a target service and a coordinator here; stop them all with Ctrl-C.

    A service's other options are read from its environment: TANDEM_TARGET_..., TANDEM_DRAFT_..., TANDEM_COORDINATOR_...
    """
    options = UpOptions(
        target=target,
        model=model,
        draft=draft,
        method=method,
        devices=DeviceOptions(
            device, target_device, draft_device, target_memory_utilization, draft_memory_utilization
        ),
        dtype=dtype,
        threads=threads,
        max_length=max_length,
        num_speculative_tokens=num_speculative_tokens,
        draft_ahead=draft_ahead,
        chat_template=chat_template,
        config_file=config_file,
        port=port,
        http_port=http_port,
        http=http,
        log_level=log_level,
    )
    with errors_to_exit():
        arguments = service_arguments(options)
    try:
        asyncio.run(_Cluster(arguments).run())
    except TandemError as error:
        exit_with(error, 1)


class _Cluster:
    def __init__(self, arguments: ServiceArguments) -> None:
        self._arguments = arguments
        self._children: list[_Child] = []

    async def run(self) -> None:
        """Run until a signal, or until a child ends.

        Raises:
            ServiceUnavailableError: a child ended.
        """
        with stop_signals(before_end=self._kill) as stopping:
            work = asyncio.create_task(self._serve())
            stop = asyncio.create_task(stopping.wait())
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if work.done():
                work.result()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    def _kill(self) -> None:
        """End the children at once."""
        for child in self._children:
            child.kill()

    async def _ready(self, coordinator: _Child) -> list[str]:
        """The lines to end the start with, once the coordinator answers: its address, the page, the next command."""
        # In the order of its output.
        url = await coordinator.line("http on ") if self._arguments.has_http else None
        address = await coordinator.line("ready on ")
        page = [] if url is None else [f"page on {url}/ (OpenAI's API under {url}/v1)"]
        return [f"ready on {address}", *page, f"next, in another terminal: {next_command(address)}"]

    async def _serve(self) -> None:
        # The stack ends the coordinator first: it drains while the models still answer it.
        async with AsyncExitStack() as stack:
            models = {"target": self._arguments.target, "draft": self._arguments.draft}
            started = {
                name: await stack.enter_async_context(self._child(name, arguments))
                for name, arguments in models.items()
                if arguments is not None
            }
            addresses = [
                word
                for name, child in started.items()
                for word in (f"--{name}-address", await child.line("listening on "))
            ]
            coordinator = await stack.enter_async_context(
                self._child("coordinator", [*self._arguments.coordinator, *addresses])
            )
            ends = [asyncio.create_task(child.end()) for child in self._children]
            ready = asyncio.create_task(self._ready(coordinator))
            stack.callback(ready.cancel)  # first, or it would see the coordinator's end
            await asyncio.wait({*ends, ready}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done() and ready.exception() is None:
                for line in ready.result():
                    announce(f"tandem up: {line}")
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            ready.cancel()
            ended = next(
                child
                for child, end in zip(self._children, ends, strict=True)
                if end.done() or child is coordinator
            )
            for end in ends:
                end.cancel()
            raise ServiceUnavailableError(f"{await ended.obituary()}; the other services were stopped")

    @asynccontextmanager
    async def _child(self, name: str, arguments: Sequence[str]) -> AsyncIterator[_Child]:
        child = await _started(name, arguments)
        self._children.append(child)
        try:
            yield child
        finally:
            await asyncio.shield(child.stop())


class _Child:
    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process

    async def line(self, mark: str) -> str:
        """Text after the mark in the first line of stdout that has it.

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
        if code < 0:
            return f"the {self.name} service was ended by signal {-code}"
        return f"the {self.name} service ended with exit code {code}"

    def kill(self) -> None:
        """End it at once."""
        if self.process.returncode is None:
            self.process.kill()

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


async def _started(name: str, arguments: Sequence[str]) -> _Child:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # otherwise Python would import files from the working directory
        *("-m", "tandem.serving.supervised", str(os.getpid()), str(package_of(name, arguments))),
        *arguments,
        # Never written to: when this process ends, the pipe closes, which the child notices.
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # A session of its own: Ctrl-C reaches only this process, which then stops the children in order.
        start_new_session=True,
    )
    return _Child(name, process)
