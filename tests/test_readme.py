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
from pathlib import Path

import pytest

from tests.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL_BLOCKS = [block.splitlines() for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)]
TIMEOUT_SECONDS = 240

# A smaller run of the same command.
ARGUMENTS = {"make demo": ["ARGS=--prompts 2 --max-tokens 16"]}


def words_of(command: str) -> list[str]:
    """The command's words, with the console script of the environment that runs the tests."""
    words = shlex.split(command)
    if words[0] == ".venv/bin/tandem":
        words[0] = str(Path(sys.executable).with_name("tandem"))
    return words


def keeps_running(command: str) -> bool:
    return words_of(command)[1] in ("up", "serve")


def is_run_by_ci(command: str) -> bool:
    return command in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


@contextmanager
def running(command: str) -> Iterator[None]:
    """Start a command that keeps running, wait until it says that it is ready, and stop it in the end."""
    process = subprocess.Popen(words_of(command), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert any("ready on" in line for line in process.stdout), f"{command}: exit code {process.wait()}"
        yield
    finally:
        process.send_signal(signal.SIGINT)
        _, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, command


@cache
def run(command: str) -> str:
    return execute(*words_of(command), *ARGUMENTS.get(command, []))


def execute(*words: str) -> str:
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    assert done.returncode == 0, f"{words}: {done.stderr}"
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
        for command in services:
            running_services.enter_context(running(command))
        for command in commands:
            assert run(command).strip(), f"{command} printed nothing"


def words_around_figures(text: str) -> list[str]:
    """The demo's lines without its figures, its completion and the widths of its columns."""
    before, _, after = text.partition("\n\nparse: ")
    heading, _, after = after.partition("\n")
    _, _, after = after.partition(" proposed tokens:\n")
    return [re.sub(r"[\d.]+", "N", " ".join(line.split())) for line in (before, heading, *after.splitlines())]


@pytest.mark.slow
def test_the_readme_shows_what_the_demo_prints() -> None:
    (shown,) = re.findall(r"```text\n(Starting .*?)```", README, re.DOTALL)
    printed = run("make demo")
    printed = printed[printed.index("Starting ") :]
    # A make inside another one, as in CI, tells of the folders that it enters and leaves.
    printed = "".join(line for line in printed.splitlines(keepends=True) if not line.startswith("make["))
    assert words_around_figures(shown) == words_around_figures(printed)
    assert max(map(len, [*shown.splitlines(), *printed.splitlines()])) <= 80


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
