"""Handles of the services that a nursery starts."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.end_to_end.processes import START_SECONDS, clean_environment, is_alive, until
from tests.paths import ROOT

_FIRST_PORT = 20_000
"""Above the ports of well-known services."""


class Nursling:
    """A service of a nursery, which can be started again on its port."""

    def __init__(self, nursery: Nursery, package: str, arguments: tuple[str, ...]) -> None:
        self.port = free_port()
        self.pid = 0
        self._nursery = nursery
        self.package = package
        self._arguments = arguments
        self._folder = Path()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start, without waiting until it is ready."""
        arguments = ("--port", str(self.port), *self._arguments)
        self.pid, self._folder = self._nursery.fork(self.package, *arguments)

    @property
    def is_ready(self) -> bool:
        return "ready on" in self._text("stdout")

    @property
    def is_alive(self) -> bool:
        return self.pid > 0 and is_alive(self.pid)

    @property
    def story(self) -> str:
        return f"{self.package} {self.address}\n{self._text('stdout')}\n{self._text('stderr')}"

    def await_ready(self) -> None:
        until(lambda: self.is_ready or not self.is_alive, START_SECONDS, lambda: self.story)
        assert self.is_ready, self.story

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the service with SIGKILL."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
            until(lambda: not self.is_alive, 5.0)

    def _text(self, name: str) -> str:
        path = self._folder / name
        return path.read_text(encoding="utf-8") if path.is_file() else ""


class Nursery:
    """Forks services, and ends those that are left."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._forks = 0
        self._nurslings: list[Nursling] = []

    def nursling(self, package: str, *arguments: str) -> Nursling:
        """Create a service without starting it."""
        made = Nursling(self, package, arguments)
        self._nurslings.append(made)
        return made

    def model_service(self, package: str, model: Path, *arguments: str) -> Nursling:
        """Create a service with a model, on one thread."""
        return self.nursling(package, "--model", str(model), "--threads", "1", *arguments)

    def paced_service(self, role: str, model: Path, pace: str) -> Nursling:
        """Create a target or draft whose steps have a minimum duration: `VERIFY_MS,DRAFT_STEP_MS`."""
        paced = ("--role", role, "--pace", pace)
        return self.model_service("benchmarks.pace", model, *paced)

    def started(self, package: str, model: Path, *arguments: str) -> Nursling:
        """Start a service with a model, and wait until it is ready. It lives until the nursery ends."""
        made = self.model_service(package, model, *arguments)
        made.start()
        made.await_ready()
        return made

    def fork(self, *command: str) -> tuple[int, Path]:
        self._forks += 1
        folder = self._folder / str(self._forks)
        folder.mkdir()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(folder), *command]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline()), folder

    def close(self) -> None:
        for nursling in self._nurslings:
            nursling.kill()
        self._process.communicate()  # the nursery ends at the end of its stdin


@contextmanager
def nursery() -> Iterator[Nursery]:
    """Run a nursery during the block."""
    with TemporaryDirectory(prefix="tandem-nursery-") as name:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.end_to_end.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=clean_environment(),
        )
        made = Nursery(process, Path(name))
        try:
            yield made
        finally:
            made.close()


def free_port() -> int:
    """Return a free port outside the range of outgoing connections, to which a service can return.

    A port of the ephemeral range may have gone to a connection in the meantime: even to one that tries
    to reach the stopped service.
    """
    chance = random.SystemRandom()
    for _ in range(100):
        port = chance.randrange(_FIRST_PORT, _first_handed_out())
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


def _first_handed_out() -> int:
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
