"""The report as a page to read."""

from __future__ import annotations

from benchmarks.gpu.figures import GpuReport, ModelFigures
from benchmarks.reports.tables import markdown as pair_markdown


def markdown(report: GpuReport, command: str) -> str:
    """The whole report."""
    device = report.device
    lines = [
        "# Tandem on a GPU",
        "",
        f"`{command}`",
        "",
        f"{device.name}, {device.memory_bytes / 2**30:.0f} GiB, compute capability "
        f"{device.compute_capability or 'none'}, "
        f"torch {device.torch_version}, CUDA {device.cuda_version or 'none'}, "
        f"driver {device.driver_version or 'none'}. "
        f"It reads {device.read_bytes_per_second / 1e9:.0f} GB/s.",
        "",
    ]
    for model in report.models:
        lines += _model(model)
    for failure in report.failures:
        lines += [f"**Not measured:** {failure}", ""]
    text = "\n".join(lines)
    return text if report.pair is None else text + "\n" + pair_markdown(report.pair, None)


def _model(model: ModelFigures) -> list[str]:
    lines = [
        f"## {model.name}: {model.parameters / 1e6:,.0f} M parameters, {model.weight_bytes / 2**30:.1f} GiB",
        "",
        "Milliseconds of a step; the bound reads weights, keys and values once.",
        "",
        "| sequences x tokens | context | taken | bound | taken by bound |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {step.sequences} x {step.width} | {step.context:,} | {step.taken:.2f} | {step.bound:.2f} | "
        f"{step.taken / step.bound:.2f} |"
        for step in model.steps
    ]
    return [*lines, ""]
