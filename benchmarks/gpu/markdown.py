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
        f"It reads {device.read_bytes_per_second / 1e9:.0f} GB/s. Attention to pages: {device.paged_attention}.",
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
        "| sequences x tokens | context | eager | captured | bound | captured by bound |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for step in model.steps:
        captured = "" if step.captured is None else f"{step.captured:.2f}"
        ratio = "" if step.captured is None else f"{step.captured / step.bound:.2f}"
        lines.append(
            f"| {step.sequences} x {step.width} | {step.context:,} | {step.eager:.2f} | {captured} | "
            f"{step.bound:.2f} | {ratio} |"
        )
    missing = [each for each in model.captures if each.reason is not None]
    lines += ["", f"{len(model.captures) - len(missing)} of {len(model.captures)} sizes were captured."]
    lines += [f"- {each.shape}: {each.reason}" for each in missing]
    return [*lines, ""]
