"""`tandem bench`: the yardstick, from its command line to its files."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.chart import svg
from benchmarks.report import Report
from benchmarks.settings import BenchSettings, parse
from benchmarks.tables import markdown, show
from coordinator.cli.exit_codes import exit_code
from tandem.errors import TandemError
from tandem.logs import configure
from tandem.settings import exit_with

_WIDTH = 132
"""Of the tables in a pipe or a file."""


def run(arguments: Sequence[str], program: str = "tandem bench") -> None:
    """Measure, print the tables, write the files. Ends the process with one sentence when it cannot."""
    try:
        settings = parse(arguments, program)
        configure("warning", "text")
        report = asyncio.run(_measure(settings, shlex.join([*program.split(), *arguments])))
    except TandemError as error:
        exit_with(error, exit_code(error))
        return
    except KeyboardInterrupt:
        sys.exit(130)
    console = Console()
    show(console if console.is_terminal else Console(width=_WIDTH), report)
    write(report, settings)


async def _measure(settings: BenchSettings, command: str) -> Report:
    # Not before the options were understood: torch takes seconds to import.
    from benchmarks.measure import measure

    console = Console(stderr=True)
    with console.status("") as status:
        return await measure(settings, status.update if console.is_terminal else _say, command)


def _say(_: str) -> None:
    """Progress is for people who watch."""


def write(report: Report, settings: BenchSettings) -> None:
    """Write the files that were asked for."""
    if settings.json_file is not None:
        _write(settings.json_file, report.model_dump_json(indent=1) + "\n")
    if settings.svg_file is not None:
        _write(settings.svg_file, svg(report))
    if settings.markdown_file is not None:
        chart = None if settings.svg_file is None else settings.svg_file.name
        _write(settings.markdown_file, markdown(report, chart))


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
