"""A supervised process ends with its parent, by the kernel's signal and by the end of its stdin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.processes import is_alive, until

SECONDS = 30.0
"""Bound on an event that takes some tens of milliseconds."""
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


def test_it_is_the_package_with_its_arguments(package: dict[str, str]) -> None:
    with subprocess.Popen(
        command(str(os.getpid())), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=package
    ) as process:
        assert process.stdout is not None
        pid, _, rest = process.stdout.readline().partition(" ")
        assert int(pid) == process.pid
        assert "idle/__main__.py', '--option', '1'] False" in rest
        assert process.poll() is None
        process.kill()


def test_the_process_ends_with_its_stdin(package: dict[str, str]) -> None:
    """Its parent lives on, so nothing else ends it."""
    with subprocess.Popen(
        command(str(os.getpid())), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=package
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
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
    done = subprocess.run(
        command("1"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=package,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode < 0
    assert done.stdout == b""
