"""Every command of the README is run: here, by tests/test_first_hour.py, or by CI itself."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache

import pytest

from tests.commands import run_here
from tests.end_to_end import processes
from tests.end_to_end.processes import Process
from tests.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL_BLOCKS = [block.splitlines() for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)]

# A smaller run of the same command.
ARGUMENTS = {"make demo": ["ARGS=--model demo --prompts 1 --max-tokens 16"]}


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
        run_up = processes.running(sys.executable, "-P", "-m", "tests.end_to_end.stand_in", *arguments)
    else:
        run_up = processes.service(program, *arguments)
    with run_up as process:
        yield process
        process.signal(signal.SIGINT)
        assert process.wait() == 0, process.story


@cache
def run(command: str) -> str:
    program, *arguments = words_of(command)
    if program == "tandem":
        done = run_here(*arguments)
    else:
        words = [program, *arguments, *ARGUMENTS.get(command, [])]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


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
