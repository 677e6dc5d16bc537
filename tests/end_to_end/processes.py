"""Services and commands as real processes, none of which outlives its `with` block."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.paths import ROOT

TANDEM = str(Path(sys.executable).with_name("tandem"))
"""The console script of the environment that runs the tests."""

AHEAD = ("--speculation-policy", "fixed", "--draft-ahead", "8")
"""Options of a coordinator that always drafts ahead."""

NO_KERNELS = ("--compile", "off")
"""Options of a model service whose text nobody times: to trace the model and try the kernels takes most of a start."""

WARM_UP_SECONDS = 0.2
"""A service prepares and measures only small steps at startup. The others are prepared when a test wants them."""

START_SECONDS = 300.0
"""Bound on a start; importing torch takes many seconds on two busy cores."""
_POLL_SECONDS = 0.02
_FIRST_PORT = 20_000
"""Above the ports of well-known services."""


class Process:
    """A child process and its output, which goes to files, so that nobody has to read it meanwhile."""

    def __init__(self, pid: int, folder: Path, code: Callable[[], int | None]) -> None:
        """Take over a process; `code` returns its exit code, None while it runs."""
        self.pid = pid
        self._folder = folder
        self._code = code

    @property
    def stdout(self) -> str:
        return (self._folder / "stdout").read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        return (self._folder / "stderr").read_text(encoding="utf-8")

    @property
    def has_ended(self) -> bool:
        return self._code() is not None

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = START_SECONDS) -> int:
        """Return the exit code; fail if the process does not end within the time."""
        until(lambda: self.has_ended, seconds, lambda: f"still running\n{self.story}")
        code = self._code()
        assert code is not None
        return code

    def stop(self, seconds: float = 40.0) -> int:
        """Send SIGTERM, and return the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(seconds)

    def line(self, mark: str, seconds: float = START_SECONDS) -> str:
        """Return the text after the mark on the first line of stdout that contains it; fail if there is none."""
        until(lambda: mark in self._whole_lines() or self.has_ended, seconds, lambda: self.story)
        assert mark in self._whole_lines(), f"ended without {mark!r} on stdout\n{self.story}"
        return self._whole_lines().partition(mark)[2].partition("\n")[0]

    @property
    def story(self) -> str:
        """Everything that helps to explain a failure."""
        return f"exit code {self._code()}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"

    def _whole_lines(self) -> str:
        return self.stdout[: self.stdout.rfind("\n") + 1]

    def kill(self) -> None:
        for pid in (*descendants(self.pid), self.pid):
            if pid != self.pid or not self.has_ended:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        until(lambda: self.has_ended and not is_alive(self.pid), START_SECONDS)


class Service:
    """A service that the nursery forks, which can be started again on its port."""

    def __init__(self, package: str, *arguments: str) -> None:
        self.port = free_port()
        self.package = package
        self._arguments = arguments
        self._process: Process | None = None

    @property
    def process(self) -> Process:
        assert self._process is not None, "it was never started"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start, without waiting until it is ready."""
        self._process = nursery().fork(self.package, "--port", str(self.port), *self._arguments)

    @property
    def is_alive(self) -> bool:
        return self._process is not None and not self._process.has_ended

    @property
    def story(self) -> str:
        return f"{self.package} {self.address}\n{self.process.story}"

    def signal(self, number: signal.Signals) -> None:
        self.process.signal(number)

    def kill(self) -> None:
        if self.is_alive:
            self.process.kill()


class Nursery:
    """Forks services of one process that has imported what they need (`tests.end_to_end.nursery`)."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="tandem-nursery-")
        self._forks = 0
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.end_to_end.nursery", self._folder.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=clean_environment(),
        )

    def fork(self, package: str, *arguments: str, environment: dict[str, str] | None = None) -> Process:
        """Start a package's service with these variables beside the clean environment."""
        self._forks += 1
        folder = Path(self._folder.name, str(self._forks))
        folder.mkdir()
        for name in ("stdout", "stderr"):
            (folder / name).touch()
        variables = clean_environment() | (environment or {})
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.write(json.dumps([str(folder), variables, package, *arguments]) + "\n")
        self._popen.stdin.flush()
        pid = int(self._popen.stdout.readline())
        ended = Path(self._folder.name, f"ended-{pid}")
        ended.unlink(missing_ok=True)  # of an earlier process with this id
        (folder / "begin").touch()
        return Process(pid, folder, lambda: int(ended.read_text()) if ended.exists() else None)

    def close(self) -> None:
        self._popen.communicate()  # the nursery ends at the end of its stdin
        self._folder.cleanup()


def ready(services: Iterable[Service]) -> list[Service]:
    """Start those that do not run, and wait until all are ready."""
    made = list(services)
    for each in made:
        if not each.is_alive:
            each.start()
    for each in made:
        address_of(each.process)
    return made


@cache
def nursery() -> Nursery:
    """The nursery of all tests of this process, started when it is first needed."""
    return Nursery()


def free_port() -> int:
    """Return a free port outside the range of outgoing connections, to which a service can return.

    A port of the ephemeral range may have gone to a connection in the meantime: even to one that tries
    to reach the stopped service.
    """
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    chance = random.SystemRandom()
    for _ in range(100):
        port = chance.randrange(_FIRST_PORT, ephemeral)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


@contextmanager
def running(
    *command: str, environment: dict[str, str] | None = None, working_folder: Path = ROOT
) -> Iterator[Process]:
    with TemporaryDirectory(prefix="tandem-process-") as name:
        folder = Path(name)
        with (
            (folder / "stdout").open("wb") as standard_out,
            (folder / "stderr").open("wb") as standard_error,
        ):
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=standard_out,
                stderr=standard_error,
                cwd=working_folder,
                env=clean_environment() | (environment or {}),
                start_new_session=True,
            )
        process = Process(popen.pid, folder, popen.poll)
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def forked(package: str, *arguments: str, environment: dict[str, str] | None = None) -> Iterator[Process]:
    process = nursery().fork(package, *arguments, environment=environment)
    try:
        yield process
    finally:
        process.kill()


def service(
    package: str, *arguments: str, environment: dict[str, str] | None = None
) -> AbstractContextManager[Process]:
    port = () if "--port" in arguments else ("--port", "0")
    return forked(package, *arguments, *port, environment=environment)


def address_of(process: Process) -> str:
    """Wait until a service is ready, and return its address."""
    return process.line("ready on ")


def metrics_of(service: Process | Service) -> str:
    """The metrics that Prometheus would scrape from a service with a port for it."""
    found = re.search(r"metrics served address=(\S+)", service.story)
    assert found, service.story
    return read(f"http://{found[1]}/metrics")


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        text: str = response.read().decode()
    return text


def total(text: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def of_model(model: Path) -> tuple[str, ...]:
    return "--model", str(model), "--threads", "1"


def model_service(package: str, model: Path, *arguments: str) -> AbstractContextManager[Process]:
    return service(package, *of_model(model), *arguments)


def coordinator(target: str, draft: str | None, *arguments: str) -> AbstractContextManager[Process]:
    """Run a coordinator over services at these addresses, with rounds that do not depend on the machine's load."""
    drafts = () if draft is None else ("--draft-address", draft)
    timeless = ("--speculation-policy", "fixed", "--draft-ahead", "off")
    policy = () if "--speculation-policy" in arguments else timeless
    return service("tandem_coordinator", "--target-address", target, *drafts, *policy, *arguments)


def run(
    *command: str,
    seconds: float = START_SECONDS,
    environment: dict[str, str] | None = None,
    folder: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with these variables beside the clean environment and nothing on stdin."""
    with running(*command, environment=environment, working_folder=folder) as process:
        code = process.wait(seconds)
        return subprocess.CompletedProcess(command, code, process.stdout, process.stderr)


def until(holds: Callable[[], bool], seconds: float, why: Callable[[], str] = lambda: "") -> None:
    """Wait until the condition holds; fail if it does not within the time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s\n{why()}"
        time.sleep(_POLL_SECONDS)


def descendants(pid: int) -> list[int]:
    """Return the ids of a process's children, their children and so on."""
    parents = {
        int(folder.name): _parent(folder) for folder in Path("/proc").iterdir() if folder.name.isdigit()
    }
    found: list[int] = []
    generation: Sequence[int] = [pid]
    while generation:
        generation = [child for child, parent in parents.items() if parent in generation]
        found += generation
    return found


def is_alive(pid: int) -> bool:
    """Return True if a process runs. A zombie counts while threads of it still end, because they hold its port."""
    folder = Path(f"/proc/{pid}")
    try:
        return _stat(folder)[0] != "Z" or len(list((folder / "task").iterdir())) > 1
    except OSError:
        return False


def _parent(folder: Path) -> int:
    try:
        return int(_stat(folder)[1])
    except OSError:  # it ended just now
        return 0


def _stat(folder: Path) -> list[str]:
    """Return the fields of the process's stat after its name: state, parent and so on."""
    return (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()


def clean_environment() -> dict[str, str]:
    """Return this environment without variables that set options or colours."""
    hidden = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "TERM", "COLUMNS")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TANDEM_") and name not in hidden
    }
    return kept | {"TERM": "xterm-256color", "XDG_CONFIG_HOME": "/nonexistent"}
