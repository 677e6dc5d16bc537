"""Runs `tandem` commands inside the tests' process, because a new process takes a second."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import TextIO
from unittest import mock

from tandem_coordinator.cli.main import main
from tests.end_to_end.processes import clean_environment


@dataclass(frozen=True, slots=True)
class Ran:
    code: int
    out: str
    err: str


def _run(arguments: tuple[str, ...], stdin: TextIO) -> Ran:
    out = io.StringIO()
    err = io.StringIO()
    code = 0
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        mock.patch.object(sys, "stdin", stdin),
        mock.patch.object(sys, "argv", ["tandem", *arguments]),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Ran(code, out.getvalue(), err.getvalue())


def run_here(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run `tandem` with these arguments, in an environment that sets none of its options."""
    with mock.patch.dict(os.environ, clean_environment(), clear=True):
        ran = _run(arguments, io.StringIO(stdin))
    return subprocess.CompletedProcess(arguments, ran.code, ran.out, ran.err)


class Commands:
    """Runs commands in the environment of the test."""

    def run(self, *arguments: str) -> Ran:
        return _run(arguments, sys.stdin)

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
