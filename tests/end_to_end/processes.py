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
"""Bound on a start: importing torch takes seconds, on two busy cores many."""
_POLL_SECONDS = 0.02


class Process:
    """A child process and what it wrote, which goes to files: nothing has to read along, and nothing is lost."""

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
        """The exit code; fails when there is none within the time."""
        try:
            return self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:g} s\n{self.story}") from None

    def stop(self, seconds: float = 40.0) -> int:
        """The exit code after a SIGTERM."""
        self.signal(signal.SIGTERM)
        return self.wait(seconds)

    def line(self, mark: str, seconds: float = START_SECONDS) -> str:
        """What follows the mark on the first line of stdout that has it; fails when the process ends without."""
        until(lambda: mark in self._whole_lines() or self.has_ended, seconds, lambda: self.story)
        assert mark in self._whole_lines(), f"ended without {mark!r} on stdout\n{self.story}"
        return self._whole_lines().partition(mark)[2].partition("\n")[0]

    @property
    def story(self) -> str:
        """Everything there is to know about a failure."""
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
    """Run a command for as long as the block lasts."""
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
    """Run a service, on a free port unless told otherwise, for as long as the block lasts."""
    port = () if "--port" in arguments else ("--port", "0")
    with running(sys.executable, "-P", "-m", package, *port, *arguments) as process:
        yield process


def address_of(process: Process) -> str:
    """Where a service listens, once it is ready."""
    return process.line("ready on ")


@contextmanager
def model_service(package: str, model: Path, *arguments: str) -> Iterator[Process]:
    """Run a model's service on one thread: the machine is shared."""
    with service(package, "--model", str(model), "--threads", "1", *arguments) as process:
        yield process


@contextmanager
def coordinator(target: str, draft: str | None, *arguments: str) -> Iterator[Process]:
    """Run a coordinator over services at these addresses, whose rounds do not depend on how busy the machine is."""
    drafts = () if draft is None else ("--draft-address", draft)
    timeless = ("--speculation-policy", "fixed", "--draft-ahead", "off")
    policy = () if "--speculation-policy" in arguments else timeless
    with service("coordinator", "--target-address", target, *drafts, *policy, *arguments) as process:
        yield process


def run(*command: str, seconds: float = START_SECONDS, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """What a command that ends by itself did."""
    with running(*command, stdin=stdin) as process:
        code = process.wait(seconds)
        return subprocess.CompletedProcess(command, code, process.stdout, process.stderr)


def until(holds: Callable[[], bool], seconds: float, why: Callable[[], str] = lambda: "") -> None:
    """Wait until it holds; fail when it does not within the time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s\n{why()}"
        time.sleep(_POLL_SECONDS)


def descendants(pid: int) -> list[int]:
    """Children of a process, their children and so on."""
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
    """Whether a process runs. A zombie does not, unless it has threads that still end: they hold its port."""
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
    """State, parent and so on: what follows the name, which may hold anything, in the process's stat."""
    return (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def clean_environment() -> dict[str, str]:
    """Ours, without what would change an option or a colour behind a test's back."""
    hidden = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "TERM", "COLUMNS")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TANDEM_") and name not in hidden
    }
    return kept | {"TERM": "xterm-256color", "XDG_CONFIG_HOME": "/nonexistent"}
