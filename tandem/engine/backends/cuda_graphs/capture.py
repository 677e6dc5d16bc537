"""Capturing work once and replaying it: CUDA graphs, where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Work: TypeAlias = Callable[[], Tensor]
"""Reads and writes tensors at fixed addresses, and returns one that each run fills again."""

Capture: TypeAlias = Callable[[Work], Work]
"""Turns work into its replay."""

_WARM_UP_RUNS = 2
"""Libraries choose algorithms and allocate workspaces on the first runs, which a graph must not hold."""


def without_capture(work: Work) -> Work:
    """Returns the work itself, which its replay must equal."""
    return work


def graph_capture(device: torch.device, *, enforce_eager: bool) -> Capture | None:
    """Captures graphs on this device; None where there is nothing to gain, or `enforce_eager` forbids it."""
    return None if enforce_eager or device.type != "cuda" else cuda_graph_capture(device)


def cuda_graph_capture(device: torch.device) -> Capture:
    """Captures CUDA graphs that share one memory pool: only one of them is replayed at a time."""
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Work) -> Work:
        current, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP_RUNS):
                work()
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = work()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    return capture
