"""Recording work once and playing it again: CUDA graphs, where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Work: TypeAlias = Callable[[], Tensor]
"""Reads and writes tensors that stay where they are, and returns one that each run fills anew."""

Recorder: TypeAlias = Callable[[Work], Work]
"""Turns work into its recording."""

_WARM_UP_RUNS = 2
"""Libraries choose algorithms and allocate workspaces on the first runs, which a recording must not hold."""


def play_directly(work: Work) -> Work:
    """The work itself: what a recording must equal."""
    return work


def recorder_for(device: torch.device, *, enforce_eager: bool) -> Recorder | None:
    """What records on this device; None where nothing is gained by it, or it was asked not to."""
    return None if enforce_eager or device.type != "cuda" else cuda_recorder(device)


def cuda_recorder(device: torch.device) -> Recorder:
    """Records CUDA graphs that share one pool of memory: only one of them is played at a time."""
    pool = torch.cuda.graph_pool_handle()

    def record(work: Work) -> Work:
        current, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP_RUNS):
                work()
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = work()

        def play() -> Tensor:
            graph.replay()
            return output

        return play

    return record
