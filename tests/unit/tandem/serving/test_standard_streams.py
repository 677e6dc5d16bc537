"""A process with an unwritable stdout prints one sentence and ends, without a traceback or an abort."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.processes import TANDEM, clean_environment

SECONDS = 60.0

COMMANDS = {
    "service": (
        sys.executable,
        "-P",
        "-m",
        "coordinator",
        "--port",
        "0",
        "--target-address",
        "127.0.0.1:1",
        "--log-level",
        "error",
    ),
    "command": (TANDEM, "config", "show", "--json"),
}
WAYS = {
    "closed": (">&-", "stdout is closed; it must be open, for example on /dev/null"),
    "full": (">/dev/full", "stdout cannot be written: no space left on device"),
}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device here")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("command", COMMANDS)
def test_stdout_that_cannot_be_written(command: str, way: str) -> None:
    redirection, sentence = WAYS[way]
    ended = shell(redirection, *COMMANDS[command])
    assert (ended.returncode, ended.stderr) == (1, f"error: {sentence}\n")


def test_a_process_without_stdin_and_stderr_works() -> None:
    """Files that the process opens must not get their numbers, or libuv aborts."""
    ended = shell("<&- 2>&-", *COMMANDS["service"], "--start-timeout-seconds", "0.2")
    assert "listening on" in ended.stdout
    assert ended.returncode == 1, "there is no target, and nobody to tell"


def shell(redirection: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command with its streams redirected as a shell does it."""
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *command],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**clean_environment(), "PYTHONSAFEPATH": "1"},
        cwd=os.sep,
        check=False,
    )
