"""`tandem` commands run inside the tests' own process: a new one for each would take a second."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from coordinator.cli.main import main


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str


class Commands:
    """Runs commands, and keeps what they print."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def run(self, *arguments: str) -> Ran:
        """`tandem` with these arguments."""
        self._monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
        self._capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        captured = self._capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    def succeed(self, *arguments: str) -> str:
        """What a command prints that must exit 0, and say nothing on stderr."""
        ran = self.run(*arguments)
        assert (ran.code, ran.err) == (0, ""), ran
        return ran.out

    def fail(self, code: int, *arguments: str) -> str:
        """The sentence of a command that must exit so, with nothing on stdout."""
        ran = self.run(*arguments)
        assert (ran.code, ran.out) == (code, ""), ran
        (line,) = ran.err.splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")
