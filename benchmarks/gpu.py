"""`make bench-gpu`: one pair on this machine's GPUs by both engines and by vLLM itself, and a report to send in."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import uvloop
from pydantic import Field

from benchmarks.bench import measure, parse, recorded_command
from benchmarks.contenders import CONTENDERS
from benchmarks.report import Data, Report, Table, markdown, markdown_table
from tandem.errors import ConfigurationError, TandemError
from tandem.logs import configure
from tandem.standard_streams import exit_with, write_error

PROGRAM = "python -m benchmarks.gpu"
RESULTS = Path(__file__).with_name("results")
PAIR = "Qwen/Qwen3-8B:Qwen/Qwen3-0.6B"
"""One tokenizer, no licence to accept, and together 18 GB in bfloat16."""

_ALONE = ("--no-phases", "--contenders")
"""No services of ours beside vLLM, which takes most of a GPU for itself."""
RUNS: dict[str, tuple[str, ...]] = {
    "engine-vllm": ("--engine", "vllm", "--contenders", "target-alone,speculative"),
    "engine-tandem": (
        *("--engine", "tandem", "--steps"),
        *("--contenders", "target-alone,speculative,speculative-ahead,one-process"),
    ),
    "vllm": (*_ALONE, "vllm"),
    "vllm-draft": (*_ALONE, "vllm-draft"),
}
"""Options of each run, one after the other, since each takes the GPUs for itself."""
_QUERY = ("index", "name", "memory.total", "driver_version", "power.limit", "pcie.link.gen.max")


class GpuReport(Data):
    """All runs on a machine."""

    version: Literal[1] = 1
    taken_at: str
    """Day and time, UTC."""
    command: str
    gpus: tuple[str, ...]
    """nvidia-smi's line about each."""
    runs: dict[str, Report] = Field(default_factory=dict)
    failures: dict[str, str] = Field(default_factory=dict)
    """Runs that failed, and why."""


def gpus() -> tuple[str, ...]:
    """A line about each GPU; none where there is no nvidia-smi."""
    command = ("nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ()
    return tuple(done.stdout.splitlines())


def options_of(name: str, arguments: Sequence[str]) -> list[str]:
    """The options of `tandem bench` for a run; those that were given come last, and win."""
    return [
        *("--pair", PAIR, "--device", "cuda", "--vllm-python", sys.executable, "--no-prefix"),
        *("--batch", "1,16,64", "--max-tokens", "128"),
        *RUNS[name],
        *arguments,
    ]


def run(arguments: Sequence[str]) -> None:
    """Measure, and write the report after each run. Ends the process with one sentence when it cannot begin."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, epilog="All other options are those of `tandem bench`."
    )
    parser.add_argument("--runs", default=",".join(RUNS), help="runs to do [default: %(default)s]")
    parser.add_argument(
        "--folder", type=Path, default=RESULTS, help="folder of gpu.json and gpu.md [default: %(default)s]"
    )
    own, others = parser.parse_known_args(arguments)
    names = own.runs.split(",")
    try:
        if unknown := [name for name in names if name not in RUNS]:
            raise ConfigurationError(f"--runs has {unknown[0]!r}; it must be of {', '.join(RUNS)}")
        settings = {name: parse(options_of(name, others), PROGRAM) for name in names}
    except TandemError as error:
        exit_with(error, 2)
        return
    configure("warning", "text")
    report = GpuReport(
        taken_at=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        command=recorded_command(PROGRAM, arguments),
        gpus=gpus(),
    )
    for name in names:
        write_error(f"{name}: {len(report.runs) + len(report.failures) + 1} of {len(names)}\n")
        try:
            command = recorded_command("tandem bench", options_of(name, others))
            measured = uvloop.run(measure(settings[name], lambda what: write_error(f"  {what}\n"), command))
            report = report.model_copy(update={"runs": {**report.runs, name: measured}})
        except TandemError as error:  # the other engine may still run
            report = report.model_copy(update={"failures": {**report.failures, name: str(error)}})
        own.folder.mkdir(parents=True, exist_ok=True)
        (own.folder / "gpu.json").write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
        (own.folder / "gpu.md").write_text(page(report), encoding="utf-8")
    sys.stdout.write(page(report))
    write_error(f"the report is {own.folder / 'gpu.md'} and {own.folder / 'gpu.json'}; please send both in\n")


def page(report: GpuReport) -> str:
    """The report as a Markdown document: all speeds in one table, then each run's own tables."""
    parts = [
        "# GPU benchmark",
        f"    {report.command}",
        report.taken_at,
        "\n".join(f"- {line}" for line in report.gpus) or "- no GPU that nvidia-smi knows",
        markdown_table(_speeds(report)),
        *(f"- {name} failed: {why}" for name, why in report.failures.items()),
    ]
    for name, each in report.runs.items():
        lines = markdown(each).splitlines()
        parts.append(
            "\n".join([f"## {name}", *(f"#{line}" if line[:1] == "#" else line for line in lines[1:])])
        )
    return "\n\n".join(parts) + "\n"


def _speeds(report: GpuReport) -> Table:
    cases = sorted({(cell.batch, cell.temperature) for run in report.runs.values() for cell in run.cells})
    found = (
        (name, CONTENDERS[contender].title, [run.cell(contender, *case) for case in cases])
        for name, run in report.runs.items()
        for contender in run.settings.contenders
    )
    return Table(
        title="Tokens per second, medians",
        columns=(
            *(("run", ""), ("contender", "")),
            *((f"batch {batch}, T {heat:g}", "tokens/s") for batch, heat in cases),
        ),
        rows=tuple(
            (name, title, *(cell and cell.speed.median for cell in cells))
            for name, title, cells in found
            if any(cells)
        ),
    )


if __name__ == "__main__":
    run(sys.argv[1:])
