"""Every command of the README is run: here, by tests/test_first_hour.py, or by CI itself."""

from __future__ import annotations

import asyncio
import io
import re
import shlex
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, redirect_stdout
from functools import cache
from unittest import mock

import pytest

from benchmarks import demo
from tests.commands import run_here
from tests.end_to_end import processes
from tests.end_to_end.processes import Process
from tests.paths import DEMO_DRAFT, DEMO_TARGET, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL_BLOCKS = [block.splitlines() for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)]


def words_of(command: str) -> list[str]:
    words = shlex.split(command)
    return ["tandem", *words[1:]] if words[0] == ".venv/bin/tandem" else words


def keeps_running(command: str) -> bool:
    return words_of(command)[1] in ("up", "serve")


def is_run_by_ci(command: str) -> bool:
    return command in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


@contextmanager
def running(command: str) -> Iterator[Process]:
    """Run a command that keeps running during the block, and end it with Ctrl-C."""
    program, *arguments = words_of(command)
    if arguments[0] == "up":  # tests/test_first_hour.py runs it with its services
        program = "stand_in"
    with processes.service(program, *arguments) as process:
        yield process
        process.signal(signal.SIGINT)
        assert process.wait() == 0, process.story


@cache
def run(command: str) -> str:
    program, *arguments = words_of(command)
    if program == "make":
        assert arguments == ["demo"]
        return demonstrate()
    done = run_here(*arguments)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def demonstrate() -> str:
    """Run `make demo` on one prompt, over forks in place of `tandem up`, which tests/test_first_hour.py runs."""
    asked = ["make", "--no-print-directory", "--dry-run", "demo", "ARGS=--model demo"]
    recipe = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert recipe.splitlines()[-1].endswith("/python -m benchmarks.demo --model demo")

    @asynccontextmanager
    async def cluster(*command: str) -> AsyncIterator[str]:
        assert command == ("coordinator.cli", "up", "--model", "demo", "--no-http")
        with (
            processes.model_service("target_service", DEMO_TARGET) as target,
            processes.model_service("draft_service", DEMO_DRAFT) as draft,
            processes.coordinator(processes.address_of(target), processes.address_of(draft)) as process,
        ):
            yield processes.address_of(process)

    with mock.patch.object(demo, "service", cluster), redirect_stdout(io.StringIO()) as out:
        asyncio.run(demo.main("demo", 1, 16))
    assert "SPEED-UP" in out.getvalue()
    return out.getvalue()


def stories() -> dict[tuple[str, ...], list[str]]:
    """The other commands by those that keep running beside them; what the README starts twice is started once."""
    found: dict[tuple[str, ...], list[str]] = {}
    services: tuple[str, ...] = ()
    for block in SHELL_BLOCKS:
        started = tuple(command for command in block if keeps_running(command))
        services = started or services
        commands = found.setdefault(services, [])
        commands += [command for command in block if command not in started and not is_run_by_ci(command)]
    return found


CLUSTER = (".venv/bin/tandem up",)
OTHERS = {services: commands for services, commands in stories().items() if services != CLUSTER}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("services", "commands"),
    OTHERS.items(),
    ids=[services[-1] if services else "alone" for services in OTHERS],
)
def test_every_shell_command_works(services: Sequence[str], commands: Sequence[str]) -> None:
    with ExitStack() as running_services:
        started = [running_services.enter_context(running(command)) for command in services]
        for process in started:
            process.line("ready on ")
        for command in commands:
            assert run(command).strip(), f"{command} printed nothing"


def test_every_link_leads_somewhere() -> None:
    """Pages outside docs/; `mkdocs build --strict` checks the links of the others, with their anchors."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "models").rglob("*.md")]
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    ]
    assert links
    assert [(page, link) for page, link in links if not (page.parent / link).exists()] == []
