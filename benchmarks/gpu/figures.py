"""The figures of a GPU, as written to JSON."""

from __future__ import annotations

from benchmarks.reports.report import Data, Report


class DeviceFacts(Data):
    """The device, and how fast it reads."""

    name: str
    memory_bytes: int
    compute_capability: str
    """Major and minor number; empty on a CPU."""
    torch_version: str
    cuda_version: str
    driver_version: str
    read_bytes_per_second: float
    """Bandwidth of reading a tensor of a gibibyte, or of less where there is less memory."""
    paged_attention: str
    """The function that reads pages here: varlen_attn, or plain torch."""


class StepFigure(Data):
    """One size of step of one model. Milliseconds, medians."""

    sequences: int
    width: int
    """Tokens of each sequence."""
    context: int
    """Tokens that each sequence had before."""
    eager: float
    captured: float | None
    """None: this size was not captured, see `CaptureFigure`."""
    bound: float
    """Time to read the weights and the sequences' keys and values once, at the measured rate."""


class CaptureFigure(Data):
    """Result of capturing a size of step, or a whole proposal."""

    shape: str
    reason: str | None
    """Why it was not captured; None if it was."""


class ModelFigures(Data):
    """The steps of one model."""

    name: str
    parameters: int
    weight_bytes: int
    load_bytes: int
    """Memory of the device that weights and graphs take together; 0 on a CPU."""
    steps: tuple[StepFigure, ...]
    captures: tuple[CaptureFigure, ...]


class GpuReport(Data):
    """Everything that `make bench-gpu` measured."""

    device: DeviceFacts
    models: tuple[ModelFigures, ...]
    pair: Report | None = None
    """The pair through the services; None if it was left out."""
    failures: tuple[str, ...] = ()
    """Parts that could not be measured, and why."""
