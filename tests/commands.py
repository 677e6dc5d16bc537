"""Runs `tandem` commands inside the tests' process, because a new process takes a second."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest import mock

import pytest

from coordinator.cli.main import main
from tests.end_to_end.processes import clean_environment


@dataclass(frozen=True, slots=True)
class Ran:
    code: int
    out: str
    err: str


def run_here(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run `tandem` with these arguments, in an environment that sets none of its options."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        mock.patch.object(sys, "stdin", io.StringIO(stdin)),
        mock.patch.object(sys, "argv", ["tandem", *arguments]),
        mock.patch.dict(os.environ, clean_environment(), clear=True),
    ):
        try:
            main()
        except SystemExit as end:
            code = _code(end)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def _code(end: SystemExit) -> int:
    return end.code if isinstance(end.code, int) else int(end.code is not None)


class Commands:
    """Runs commands, and keeps what they print."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def run(self, *arguments: str) -> Ran:
        self._monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
        self._capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = _code(end)
        captured = self._capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    def succeed(self, *arguments: str) -> str:
        """Run a command that must exit 0 with an empty stderr, and return its output."""
        ran = self.run(*arguments)
        assert (ran.code, ran.err) == (0, ""), ran
        return ran.out

    def fail(self, code: int, *arguments: str) -> str:
        """Run a command that must exit with this code and an empty stdout, and return its sentence."""
        ran = self.run(*arguments)
        assert (ran.code, ran.out) == (code, ""), ran
        (line,) = ran.err.splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")
