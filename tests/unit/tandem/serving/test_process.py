"""Processes of services: log lines, standard streams that fail, parents, and why they ended."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.serving.children import Child
from tandem.telemetry.logs import configure
from tests.end_to_end.processes import TANDEM, is_alive, run, until

SECONDS = 60.0
COMMANDS = {
    "service": (sys.executable, "-P", "-m", "tandem_coordinator", "--port", "0", "--target-address", "127.0.0.1:1",
        "--log-level", "error"),
    "command": (TANDEM, "config", "show", "--json"),
}  # fmt: skip
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
    words = ("sh", "-c", f'exec "$@" {redirection}', "sh", *command)
    return run(*words, seconds=SECONDS, environment={"PYTHONSAFEPATH": "1"}, folder=Path(os.sep))


IDLE = """
import os, sys, time
print(os.getpid(), sys.argv, sys.path[0] == os.getcwd(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def package(tmp_path: Path) -> dict[str, str]:
    """An environment in which the package `idle` is found, which says who it is and sleeps."""
    (tmp_path / "idle").mkdir()
    (tmp_path / "idle" / "__main__.py").write_text(IDLE, encoding="utf-8")
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def command(parent: str) -> list[str]:
    return [sys.executable, "-P", "-m", "tandem.serving.supervised", parent, "idle", "--option", "1"]


def test_it_is_the_package_with_its_arguments_and_ends_with_its_stdin(package: dict[str, str]) -> None:
    """Its parent lives on, so nothing else ends it."""
    with subprocess.Popen(
        command(str(os.getpid())), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=package
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pid, _, rest = process.stdout.readline().partition(" ")
        assert int(pid) == process.pid
        assert "idle/__main__.py', '--option', '1'] False" in rest
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(SECONDS) < 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
def test_the_process_ends_when_its_parent_is_killed(package: dict[str, str]) -> None:
    """Its stdin stays open, held by this test, so only the kernel can tell."""
    reading, writing = os.pipe()
    parent_code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([*sys.argv[1:], 'tandem.serving.supervised', str(os.getpid()), 'idle'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    arguments = [sys.executable, "-c", parent_code, sys.executable, "-P", "-m"]
    try:
        with subprocess.Popen(
            arguments, stdin=reading, stdout=subprocess.PIPE, text=True, env=package
        ) as parent:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            assert str(child) in parent.stdout.readline()  # the child's own word: its guards stand
            parent.kill()
            parent.wait()
            until(lambda: not is_alive(child), SECONDS)
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
def test_a_parent_that_is_gone_already(package: dict[str, str]) -> None:
    done = run(*command("1"), seconds=SECONDS, environment=package)
    assert done.returncode < 0
    assert done.stdout == ""


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "text")
    logging.getLogger("tandem.x").info(
        "draft lost", extra={"seconds": 0.25, "error": "gone away", "empty": ""}
    )
    line = capsys.readouterr().err
    assert line.endswith(' info    tandem.x: draft lost seconds=0.25 error="gone away" empty=""\n')


def test_json_with_an_exception(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "json")
    try:
        raise ValueError("odd")
    except ValueError:
        logging.getLogger("tandem.x").exception("step failed", extra={"sequences": 3})
    event = json.loads(capsys.readouterr().err)
    assert (event["level"], event["logger"], event["message"]) == ("error", "tandem.x", "step failed")
    assert event["sequences"] == 3
    assert "ValueError: odd" in event["exception"]


def test_less_severe_lines_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    configure("warning", "text")
    logging.getLogger("tandem.x").info("detail")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("sys.exit(3)", "ended with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 1)", f"was ended by signal {signal.SIGRTMIN + 1}"),
        (
            "os.kill(os.getpid(), signal.SIGILL)",
            "this CPU lacks or the system does not allow; try --dtype float32",
        ),
    ],
)
async def test_the_reason_is_told(end: str, told: str) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", f"import os, signal, sys; {end}")
    sentence = await Child("draft", process, 1.0).obituary()
    assert sentence.startswith("the draft service ")
    assert sentence.endswith(told)


async def test_to_stop_a_child_does_not_take_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    process = await asyncio.create_subprocess_exec("sleep", "60")
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "poll", lambda _: pytest.fail("it was taken"))
        await Child("draft", process, 10.0).stop()
    assert process.returncode == -signal.SIGTERM
