"""`make bench-gpu`: one pair on this machine's GPUs by both engines and by vLLM itself, and a report to send in."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.bench import measure, parse, recorded_command
from benchmarks.report import markdown
from tandem.errors import ConfigurationError, TandemError
from tandem.logs import configure
from tandem.standard_streams import exit_with, write_error, write_out

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


def gpus() -> list[str]:
    """A line about each GPU; none where there is no nvidia-smi."""
    command = ("nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


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
    known = gpus()
    page = ["# GPU benchmark", "\n".join(f"- {line}" for line in known or ["no GPU that nvidia-smi knows"])]
    runs: dict[str, Any] = {}
    own.folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        write_error(f"{name}: {len(runs) + 1} of {len(names)}\n")
        command = recorded_command("tandem bench", options_of(name, others))
        try:
            report = uvloop.run(measure(settings[name], lambda what: write_error(f"  {what}\n"), command))
        except TandemError as error:  # the other engine may still run
            page.append(f"# {name}: failed\n\n{error}")
            runs[name] = {"failed": str(error)}
        else:
            page.append(markdown(report).replace("# Benchmark", f"# {name}", 1))
            runs[name] = report.model_dump(mode="json")
        found = json.dumps({"gpus": known, "runs": runs}, indent=1)
        (own.folder / "gpu.json").write_text(f"{found}\n", encoding="utf-8")
        (own.folder / "gpu.md").write_text("\n\n".join(page), encoding="utf-8")
    write_out("\n\n".join(page))
    write_error(f"the report is {own.folder / 'gpu.md'} and {own.folder / 'gpu.json'}; please send both in\n")


if __name__ == "__main__":
    run(sys.argv[1:])
