"""A user in a folder of their own who has the wheel and a running cluster, for tests/test_first_hour.py."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.commands import Ran
from tests.end_to_end.processes import clean_environment

DRIVER = """
import contextlib, io, json, sys
from coordinator.cli.main import main

results = []
for call in json.loads(sys.argv[1]):
    sys.argv = ["tandem", *call]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    results.append({"code": code, "out": out.getvalue(), "err": err.getvalue()})
print(json.dumps(results))
"""
"""Runs `tandem` commands one after the other, and prints their exit codes and outputs as JSON."""


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A user with the wheel, in a folder of their own, for whom `tandem up` runs."""

    bin: Path
    folder: Path
    address: str
    """The coordinator's address."""
    url: str
    """The page's URL, without the / at its end."""

    def run(self, *lines: str) -> list[Ran]:
        """Run `tandem` commands in one process, because importing it takes a second, and return what each did."""
        calls = [self.words(line)[1:] for line in lines]
        results = self.python(DRIVER, json.dumps(calls))
        return [Ran(**ran) for ran in json.loads(results)]

    def words(self, line: str) -> list[str]:
        """Split a command into words, with the addresses of this cluster."""
        localized = line.replace("http://127.0.0.1:8000", self.url).replace("127.0.0.1:50051", self.address)
        return shlex.split(localized)

    def python(self, source: str, *arguments: str) -> str:
        """Run a Python program, and return its output."""
        return self.execute(str(self.bin / "python"), "-P", "-c", source, *arguments)

    def execute(self, *words: str) -> str:
        """Run a command that must succeed, and return its output."""
        environment = clean_environment() | {
            "PYTHONPATH": "",
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "TANDEM_CLIENT_ADDRESS": self.address,
            "no_proxy": "*",
        }
        ran = subprocess.run(
            words, cwd=self.folder, env=environment, capture_output=True, text=True, check=False, timeout=240
        )
        assert ran.returncode == 0, f"{words}: {ran.stderr}"
        return ran.stdout
