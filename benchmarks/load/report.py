"""Reports on a load, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.load.coordinator_waits import BETWEEN
from benchmarks.load.figures import Figures


@dataclass(frozen=True, slots=True)
class Used:
    """Resources that one process used, its children included."""

    processor_milliseconds_per_token: float
    mebibytes: list[float]
    """Resident memory of the process and of its children at the end."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Result of a load, as `--json` writes it."""

    options: Mapping[str, Any]
    figures: Figures
    used: Mapping[str, Used]
    """By process; of a coordinator elsewhere, only the clients'."""
    round_waits: Mapping[str, Mapping[str, float]]
    """p50 and p99 in milliseconds of the times that a round waits in the coordinator, by place; empty where its metrics
    are not read."""


_PLACES = {
    "event_loop": "an answer, to be read",
    "answer": "a round, to go on with its answer",
    BETWEEN: "a round, from acceptance to its question",
    "question": "a question, to be written",
}
"""The places where a round waits in the coordinator, in its order."""


def table(report: LoadReport) -> Table:
    """The report as a table of two columns."""
    found = report.figures
    shown = Table("figure", "value")
    rows: list[tuple[str, str]] = [
        ("requests completed / failed", f"{found.completed} / {found.failed}"),
        *((f"failed with {name}", f"{count}: {found.reasons[name]}") for name, count in found.errors.items()),
        ("duration (s)", f"{found.seconds:.1f}"),
        ("tokens of prompts / completions", f"{found.prompt_tokens} / {found.output_tokens}"),
        ("requests per second", f"{found.requests_per_second:.2f}"),
    ]
    if found.goodput is not None:
        bounds = " ".join(report.options["goodput"])
        rows.append((f"goodput, requests per second ({bounds})", f"{found.goodput:.2f}"))
    rows.append(("completion tokens per second", f"{found.output_tokens_per_second:.0f}"))
    for name, spread in found.latencies.items():
        each = ", ".join(f"{percent} {value:.1f}" for percent, value in spread.percentiles.items())
        rows.append((f"{name.upper()} (ms)", f"mean {spread.mean:.1f}, {each}"))
    for name, used in report.used.items():
        sizes = " + ".join(f"{size:.0f}" for size in used.mebibytes)
        rows.append(
            (f"{name}: ms of a core per token; MiB", f"{used.processor_milliseconds_per_token:.3f}; {sizes}")
        )
    for place, words in _PLACES.items():
        if place in report.round_waits:
            each = ", ".join(f"{name} {value:.2f}" for name, value in report.round_waits[place].items())
            rows.append((f"waits (ms): {words}", each))
    for row in rows:
        shown.add_row(*row)
    return shown
