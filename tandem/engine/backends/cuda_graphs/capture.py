"""Capturing work once and replaying it: CUDA graphs, where there is a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from tandem.engine.backends.trial import DistrustedError, trusted
from tandem.types import GraphCaptures

logger = logging.getLogger(__name__)

Work: TypeAlias = Callable[[], Tensor]
"""Reads and writes tensors at fixed addresses, and returns one that each run fills again."""

Capture: TypeAlias = Callable[[Work], Work]
"""Turns work into its replay."""

_WARM_UP_RUNS = 2
"""Libraries choose algorithms and allocate workspaces on the first runs, which a graph must not hold."""


class _Shape(Protocol):
    def __lt__(self, other: Any, /) -> bool: ...


ShapeT = TypeVar("ShapeT", bound=_Shape)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CaptureOutcome:
    """Result of capturing work of one shape."""

    shape: str
    """As people read it."""
    reason: str | None = None
    """Why it was not captured; None if it was."""
    what: str = ""
    """The name of the work."""
    memory_bytes: int = 0
    """Memory of the device that the capture took beyond that of earlier ones."""


def capture_each(
    what: str,
    shapes: Iterable[ShapeT],
    make: Callable[[ShapeT], T],
    error_of: Callable[[T], float],
    limit: float,
    device: torch.device,
) -> tuple[list[T], list[CaptureOutcome]]:
    """Captures work of each shape on its own, the largest first: the smaller ones then fit into the memory it took.

    A shape that cannot be captured, or gives wrong results, leaves the others as they are.

    Args:
        what: the name of the work, for the log.
        shapes: any number; `str` names them.
        make: captures one.
        error_of: runs the trial: the error, in spreads.
        limit: the largest error that is trusted.
        device: where the work runs; the log says how much of its memory the captures took.

    Returns:
        What was captured, smallest first, and an outcome for each shape in the same order.
    """
    made: list[T] = []
    outcomes: list[CaptureOutcome] = []
    for shape in sorted(shapes, reverse=True):
        before, reason = reserved_bytes(device), None
        try:
            made.insert(0, trusted(lambda shape=shape: make(shape), error_of, limit))  # type: ignore[misc]
        except DistrustedError as error:
            reason = str(error)
        outcomes.insert(0, CaptureOutcome(str(shape), reason, what, reserved_bytes(device) - before))
    _log(what, outcomes, sum(outcome.memory_bytes for outcome in outcomes))
    return made, outcomes


def captures_of(*sources: object) -> GraphCaptures | None:
    """Report of a service's captures; None where nothing was to be captured.

    Args:
        sources: backends and proposers; those that capture have `outcomes`.
    """
    known: list[CaptureOutcome] = [each for source in sources for each in getattr(source, "outcomes", ())]
    if not known:
        return None
    missing = tuple(f"{each.what} {each.shape}: {each.reason}" for each in known if each.reason is not None)
    return GraphCaptures(len(known) - len(missing), missing, sum(each.memory_bytes for each in known))


def joined(*captures: GraphCaptures | None) -> GraphCaptures | None:
    """Joins the reports of several parts of a service; None where none captures."""
    known = [each for each in captures if each is not None]
    if not known:
        return None
    missing = tuple(sentence for each in known for sentence in each.missing)
    count = sum(each.captured_count for each in known)
    return GraphCaptures(count, missing, sum(each.memory_bytes for each in known))


def reserved_bytes(device: torch.device) -> int:
    """Memory of a GPU that this process has taken, graphs included; 0 elsewhere."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def _log(what: str, outcomes: list[CaptureOutcome], memory_bytes: int) -> None:
    captured = [outcome.shape for outcome in outcomes if outcome.reason is None]
    missing = {outcome.shape: outcome.reason for outcome in outcomes if outcome.reason is not None}
    level, text = (
        (logging.WARNING, "some %s could not be captured") if missing else (logging.INFO, "%s captured")
    )
    logger.log(
        level, text, what, extra={"captured": captured, "not_captured": missing, "memory_bytes": memory_bytes}
    )


def without_capture(work: Work) -> Work:
    """Returns the work itself, which its replay must equal."""
    return work


def graph_capture(device: torch.device, *, enforce_eager: bool) -> Capture | None:
    """Captures graphs on this device; None where there is nothing to gain, or `enforce_eager` forbids it."""
    return None if enforce_eager or device.type != "cuda" else cuda_graph_capture(device)


def cuda_graph_capture(device: torch.device) -> Capture:
    """Captures CUDA graphs that share one memory pool: only one of them is replayed at a time.

    Streams, pools and graphs belong to the device that is current when they are made, so it is made current here.
    """
    with torch.cuda.device(device):
        pool = torch.cuda.graph_pool_handle()

    def capture(work: Work) -> Work:
        with torch.cuda.device(device):
            current, aside = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
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
