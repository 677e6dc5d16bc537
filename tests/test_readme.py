"""Every command of the README is run: here, or by CI itself."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL_BLOCKS = [block.splitlines() for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)]
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
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


def run(command: str) -> str:
    words = [*words_of(command), *ARGUMENTS.get(command, [])]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_every_shell_command_works() -> None:
    with ExitStack() as services:
        for block in SHELL_BLOCKS:
            if keeps_running(block[0]):
                services.close()
            for command in block:
                if keeps_running(command):
                    services.enter_context(running(command))
                elif not is_run_by_ci(command):
                    assert run(command).strip(), f"{command} printed nothing"


@pytest.mark.slow
def test_the_same_seed_gives_the_same_text_under_strict_and_without_speculation() -> None:
    """What the README says of its last two generate commands."""
    commands = [command for block in SHELL_BLOCKS for command in block if "--seed 7" in command]
    strict, alone = commands[-2:]
    assert "strict" in strict
    assert "--no-speculation" in alone
    with running(".venv/bin/tandem up"):
        assert run(strict) == run(alone)


@pytest.mark.slow
def test_the_python_examples_work() -> None:
    with running(".venv/bin/tandem up"):
        for source in PYTHON_BLOCKS:
            done = subprocess.run(
                [sys.executable, "-c", source],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip()


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
