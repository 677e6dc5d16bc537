"""Measure a GPU: how fast it reads, steps of a target and a draft beside that, and the pair through the services.

make bench-gpu
make bench-gpu ARGS="--draft-device cuda:1 --pair shaped:8B:4:0.8"
python -m benchmarks.gpu --device cpu --pair demo     a rehearsal without a GPU
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.bench import BenchSettings
from benchmarks.measure import measure
from benchmarks.pairs import open_pair
from benchmarks.report import Data, Report, markdown
from benchmarks.studies.engine_steps import Steps, interleaved
from tandem.config.names import as_torch
from tandem.engine.core.selection import choose_backends
from tandem.engine.models.loading import LoadedModel, load_model

_SEQUENCES, _WIDTHS = (1, 4, 16), (1, 5)
"""Steps: as many sequences, each with one token, or with a proposal of four and the token before it."""
_CONTENDERS = ("target-alone", "speculative", "speculative-ahead", "one-process")


class StepFigure(Data):
    """One size of step of one model. Milliseconds, medians."""

    model: str
    sequences: int
    width: int
    """Tokens of each sequence."""
    step: float
    weights: float
    """Time to read the weights once, at the measured rate."""


class GpuReport(Data):
    """Everything that `make bench-gpu` measured."""

    device: str
    memory_bytes: int
    """0 on a CPU."""
    torch_version: str
    cuda_version: str
    read_bytes_per_second: float
    steps: tuple[StepFigure, ...]
    pair: Report


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the report, write the files."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(words)
    report = _measure(options)
    text = _markdown(report, shlex.join(["python", "-m", "benchmarks.gpu", *words]))
    sys.stdout.write(text + "\n")
    for file, content in ((options.json, report.model_dump_json(indent=1)), (options.markdown, text)):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content + "\n", encoding="utf-8")


def _measure(options: argparse.Namespace) -> GpuReport:
    device = torch.device(as_torch(options.device))
    settings = BenchSettings(
        pair=options.pair,
        contenders=_CONTENDERS,
        batch=tuple(options.batch),
        rounds=options.rounds,
        max_tokens=options.max_tokens,
        device=as_torch(options.device),
        draft_device=as_torch(options.draft_device or options.device),
    )
    rate = _read_bytes_per_second(device, options.rounds)
    pair = open_pair(settings.pair, settings.cache_folder, settings.device)
    steps: list[StepFigure] = []
    for name, folder in (("target", pair.target), ("draft", pair.draft)):
        model = load_model(folder, dtype=settings.dtype, device=settings.device)
        steps += _steps(name, model, rate, options.rounds)
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the services load the pair next
    is_cuda = device.type == "cuda"
    return GpuReport(
        device=torch.cuda.get_device_name(device) if is_cuda else platform.machine(),
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if is_cuda else 0,
        torch_version=torch.__version__,
        cuda_version=str(torch.version.cuda or ""),
        read_bytes_per_second=rate,
        steps=tuple(steps),
        pair=asyncio.run(measure(settings, lambda _: None, "")),
    )


def _read_bytes_per_second(device: torch.device, rounds: int) -> float:
    count = 1 << (30 if device.type == "cuda" else 26)
    numbers = torch.ones(count // 4, device=device)
    # `item` waits until the device has done what it was told to.
    timing = interleaved({"read": lambda: numbers.sum().item()}, rounds)["read"]
    return 1e3 * count / timing.median


def _steps(name: str, model: LoadedModel, rate: float, rounds: int) -> list[StepFigure]:
    weights = sum(each.nbytes for each in model.module.parameters())
    steps = Steps(choose_backends(model))
    found = []
    with torch.inference_mode():
        for sequences in _SEQUENCES:
            for width in _WIDTHS:
                timing = interleaved({name: steps.work(sequences, width)}, rounds)[name]
                milliseconds = 1e3 * weights / rate
                found.append(
                    StepFigure(
                        model=name,
                        sequences=sequences,
                        width=width,
                        step=timing.median,
                        weights=milliseconds,
                    )
                )
    return found


def _markdown(report: GpuReport, command: str) -> str:
    lines = [
        "# Tandem on a GPU",
        "",
        f"`{command}`",
        "",
        f"{report.device}, {report.memory_bytes / 2**30:.0f} GiB, torch {report.torch_version}, CUDA "
        f"{report.cuda_version or 'none'}. It reads {report.read_bytes_per_second / 1e9:.0f} GB/s.",
        "",
        "| model | sequences x tokens | ms of a step | ms to read its weights once | ratio |",
        "|---|---|---:|---:|---:|",
        *(
            f"| {step.model} | {step.sequences} x {step.width} | {step.step:.2f} | {step.weights:.2f} | "
            f"{step.step / step.weights:.2f} |"
            for step in report.steps
        ),
        "",
    ]
    return "\n".join(lines) + "\n" + markdown(report.pair)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", help="of the target")
    parser.add_argument("--draft-device", default="", help="of the draft; the target's unless given")
    parser.add_argument("--pair", default="shaped:8B:4:0.8", help="as for tandem bench")
    parser.add_argument(
        "--batch",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[1, 4, 16],
        help="requests at once",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of each completion")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    parser.add_argument("--markdown", type=Path, help="write the report to this file")
    return parser


if __name__ == "__main__":
    main()
