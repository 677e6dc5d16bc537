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


class StepFigure(Data):
    """One size of step of one model. Milliseconds, medians."""

    sequences: int
    width: int
    """Tokens of each sequence."""
    context: int
    """Tokens that each sequence had before."""
    taken: float
    bound: float
    """Time to read the weights and the sequences' keys and values once, at the measured rate."""


class ModelFigures(Data):
    """The steps of one model."""

    name: str
    parameters: int
    weight_bytes: int
    load_bytes: int
    """Memory of the device that the weights take; 0 on a CPU."""
    steps: tuple[StepFigure, ...]


class GpuReport(Data):
    """Everything that `make bench-gpu` measured."""

    device: DeviceFacts
    models: tuple[ModelFigures, ...]
    pair: Report | None = None
    """The pair through the services; None if it was left out."""
    failures: tuple[str, ...] = ()
    """Parts that could not be measured, and why."""
