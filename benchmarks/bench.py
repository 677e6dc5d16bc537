"""`tandem bench`: the yardstick, from its command line to its files."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop
from rich.console import Console

from benchmarks.reports.chart import svg
from benchmarks.reports.report import Report
from benchmarks.reports.tables import markdown, show
from benchmarks.settings import BenchSettings, parse
from benchmarks.targets import targets_of
from coordinator.cli.command import exit_code
from tandem.errors import TandemError
from tandem.logs import configure
from tandem.settings import exit_with

_MACHINES_OWN = ("--vllm-python", "--max-python", "--cache-folder")
"""Options whose values mean nothing on other machines."""

_WIDTH = 132
"""Width of tables in a pipe or a file, in characters."""


def run(arguments: Sequence[str], program: str = "tandem bench") -> None:
    """Measure, print the tables, write the files. Ends the process with one sentence when it cannot."""
    try:
        settings = parse(arguments, program)
        configure("warning", "text")
        report = uvloop.run(_measure(settings, recorded_command(program, arguments)))
    except TandemError as error:
        exit_with(error, exit_code(error))
        return
    except KeyboardInterrupt:
        sys.exit(130)
    console = Console()
    show(console if console.is_terminal else Console(width=_WIDTH), report)
    write(report, settings)


def recorded_command(program: str, arguments: Sequence[str]) -> str:
    """The command for the report, without this machine's paths to other engines' Pythons."""
    words = list(arguments)
    for index, word in enumerate(words):
        option, has_value, _ = word.partition("=")
        if option in _MACHINES_OWN and has_value:
            words[index] = f"{option}=..."
        elif option in _MACHINES_OWN and index + 1 < len(words):
            words[index + 1] = "..."
    return shlex.join([*program.split(), *words])


async def _measure(settings: BenchSettings, command: str) -> Report:
    # Not before the options were understood: torch takes seconds to import.
    from benchmarks.measure import measure

    console = Console(stderr=True)
    with console.status("") as status:
        return await measure(settings, status.update if console.is_terminal else _say, command)


def _say(_: str) -> None:
    """Print progress on a terminal."""


def write(report: Report, settings: BenchSettings) -> None:
    """Write the files that were asked for."""
    if settings.json_file is not None:
        _write(settings.json_file, report.model_dump_json(indent=1) + "\n")
    if settings.svg_file is not None:
        _write(settings.svg_file, svg(report))
    if settings.markdown_file is not None:
        chart = None if settings.svg_file is None else settings.svg_file.name
        _write(settings.markdown_file, markdown(report, chart))


def render(files: Sequence[Path]) -> None:
    """Write the chart and the tables of reports again, beside their JSON files."""
    for file in files:
        report = Report.read(file)
        report = report.model_copy(update={"targets": targets_of(report)})
        chart = file.with_suffix(".svg")
        _write(chart, svg(report))
        _write(file.with_suffix(".md"), markdown(report, chart.name))


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
