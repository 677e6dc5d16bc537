"""Measure a GPU: its memory, steps of an 8B and a 1B model, and a pair with drafting ahead.

    make bench-gpu
    make bench-gpu ARGS="--draft-device cuda:1 --pair shaped:8B:4:0.8"
    python -m benchmarks.gpu --device cpu --models tiny --pair demo     a rehearsal without a GPU

What cannot be measured is named in the report with its reason, and the rest goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.gpu.device import device_facts
from benchmarks.gpu.figures import DeviceFacts, GpuReport, ModelFigures
from benchmarks.gpu.markdown import markdown
from benchmarks.gpu.random_model import SHAPES, random_model
from benchmarks.gpu.steps import StepSizes, model_figures
from benchmarks.measure import measure
from benchmarks.reports.report import Report
from benchmarks.settings import BenchSettings
from tandem.config.names import as_torch
from tandem.errors import TandemError

T = TypeVar("T")

_CONTENDERS = ("target-alone", "speculative", "speculative-ahead", "one-process")
_REHEARSAL = StepSizes(sequences=(1, 2), contexts=(100,))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the report, write the files."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(words)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    report = _report(options)
    text = markdown(report, shlex.join(["python", "-m", "benchmarks.gpu", *words]))
    sys.stdout.write(text + "\n")
    for file, content in ((options.json, report.model_dump_json(indent=1)), (options.markdown, text)):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content + "\n", encoding="utf-8")


def _report(options: argparse.Namespace) -> GpuReport:
    device = torch.device(as_torch(options.device))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    facts = device_facts(device, options.rounds)
    failures: list[str] = []
    models = [
        found
        for name in options.models
        if (found := _tried(f"steps of {name}", failures, partial(_model, name, facts, options)))
    ]
    pair = _tried("the pair", failures, lambda: _pair(options)) if options.pair else None
    return GpuReport(device=facts, models=tuple(models), pair=pair, failures=tuple(failures))


def _model(name: str, facts: DeviceFacts, options: argparse.Namespace) -> ModelFigures:
    device = torch.device(as_torch(options.device))
    model = random_model(name, device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    return model_figures(model, _REHEARSAL if name == "tiny" else StepSizes(), facts, options.rounds)


def _pair(options: argparse.Namespace) -> Report:
    settings = BenchSettings(
        pair=options.pair,
        contenders=_CONTENDERS,
        batch=tuple(options.batch),
        rounds=options.rounds,
        device=as_torch(options.device),
        draft_device=as_torch(options.draft_device or options.device),
    )
    return asyncio.run(measure(settings, lambda _: None, ""))


def _tried(part: str, failures: list[str], work: Callable[[], T]) -> T | None:
    """The result; None where it failed, with the reason added to the failures."""
    try:
        return work()
    except (RuntimeError, ValueError, TypeError, OSError, TandemError) as error:  # for want of memory, too
        failures.append(f"{part}: {type(error).__name__}: {error}".partition("\n")[0])
        return None
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", help="of the target, and of the steps")
    parser.add_argument("--draft-device", default="", help="of the draft; the target's unless given")
    parser.add_argument(
        "--models", type=_names, default=["8B", "1B"], help=f"of {', '.join(SHAPES)}; or none"
    )
    parser.add_argument("--pair", default="shaped:8B:4:0.8", help="as for tandem bench; empty for none")
    parser.add_argument("--batch", type=_numbers, default=[1, 4, 16], help="requests at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    parser.add_argument("--markdown", type=Path, help="write the report to this file")
    return parser


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name and name != "none"]
    for name in names:
        if name not in SHAPES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(SHAPES)}")
    return names


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
