"""Services and commands as real processes, none of which outlives its `with` block."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.paths import ROOT

TANDEM = str(Path(sys.executable).with_name("tandem"))
"""The console script of the environment that runs the tests."""

AHEAD = ("--speculation-policy", "fixed", "--draft-ahead", "8")
"""Options of a coordinator that always drafts ahead."""

START_SECONDS = 90.0
"""Bound on a start; importing torch takes many seconds on two busy cores."""
_POLL_SECONDS = 0.02


class Process:
    """A child process and its output, which goes to files, so that nobody has to read it meanwhile."""

    def __init__(self, popen: subprocess.Popen[bytes], folder: Path) -> None:
        self._popen = popen
        self._folder = folder

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def stdout(self) -> str:
        return (self._folder / "stdout").read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        return (self._folder / "stderr").read_text(encoding="utf-8")

    @property
    def has_ended(self) -> bool:
        return self._popen.poll() is not None

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def wait(self, seconds: float) -> int:
        """Return the exit code; fail if the process does not end within the time."""
        try:
            return self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:g} s\n{self.story}") from None

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
        return f"exit code {self._popen.poll()}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"

    def _whole_lines(self) -> str:
        return self.stdout[: self.stdout.rfind("\n") + 1]

    def kill(self) -> None:
        """End it and all its descendants, whatever they are doing."""
        for pid in (*descendants(self.pid), self.pid):
            if pid != self.pid or not self.has_ended:
                _kill(pid)
        self._popen.wait()


@contextmanager
def running(
    *command: str, environment: dict[str, str] | None = None, stdin: str = "", working_folder: Path = ROOT
) -> Iterator[Process]:
    """Run a command during the block."""
    with TemporaryDirectory(prefix="tandem-process-") as name:
        folder = Path(name)
        (folder / "stdin").write_text(stdin, encoding="utf-8")
        with (
            (folder / "stdin").open("rb") as standard_in,
            (folder / "stdout").open("wb") as standard_out,
            (folder / "stderr").open("wb") as standard_error,
        ):
            popen = subprocess.Popen(
                command,
                stdin=standard_in,
                stdout=standard_out,
                stderr=standard_error,
                cwd=working_folder,
                env=clean_environment() | (environment or {}),
                start_new_session=True,
            )
        process = Process(popen, folder)
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def service(package: str, *arguments: str) -> Iterator[Process]:
    """Run a service during the block, by default on a free port."""
    port = () if "--port" in arguments else ("--port", "0")
    with running(sys.executable, "-P", "-m", package, *port, *arguments) as process:
        yield process


def address_of(process: Process) -> str:
    """Wait until a service is ready, and return its address."""
    return process.line("ready on ")


@contextmanager
def model_service(package: str, model: Path, *arguments: str) -> Iterator[Process]:
    """Run a model's service on one thread."""
    with service(package, "--model", str(model), "--threads", "1", *arguments) as process:
        yield process


@contextmanager
def coordinator(target: str, draft: str | None, *arguments: str) -> Iterator[Process]:
    """Run a coordinator over services at these addresses, with rounds that do not depend on the machine's load."""
    drafts = () if draft is None else ("--draft-address", draft)
    timeless = ("--speculation-policy", "fixed", "--draft-ahead", "off")
    policy = () if "--speculation-policy" in arguments else timeless
    with service("coordinator", "--target-address", target, *drafts, *policy, *arguments) as process:
        yield process


def run(*command: str, seconds: float = START_SECONDS, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    with running(*command, stdin=stdin) as process:
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


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def clean_environment() -> dict[str, str]:
    """Return this environment without variables that set options or colours."""
    hidden = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "TERM", "COLUMNS")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TANDEM_") and name not in hidden
    }
    return kept | {"TERM": "xterm-256color", "XDG_CONFIG_HOME": "/nonexistent"}
