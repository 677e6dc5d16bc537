"""`tandem plan`: what speculation gains, at which proposal length, and what would help most."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table

from coordinator.cli.admin.client import admin_client
from coordinator.cli.admin.words import percent
from coordinator.cli.command import command
from coordinator.cli.connection import ConnectionOptions
from coordinator.cli.output import OutputOptions, plain_table
from coordinator.cli.plan.chart import svg
from coordinator.cli.plan.measured import PairOptions, measured_pair
from coordinator.speculation.plan import (
    MAX_TOKENS,
    PER_8_ROWS,
    BatchPlan,
    StepTimes,
    measured_times,
    plan,
)
from tandem.errors import ConfigurationError, NotFoundError


def add_to(app: typer.Typer) -> None:
    """Add the command to its group."""
    command(
        app,
        "tandem plan --address 10.0.0.5:50051",
        "tandem plan --target models/my-target --draft models/my-draft --batch 1,8 --svg plan.svg",
        "tandem plan --verify-ms 6.5 --draft-step-ms 1.2 --acceptance 0.8 --round-trip-ms 0.5 --batch 1,8,32",
        "tandem plan --verify-ms 22 --draft-step-ms 1.5 --acceptance 0.9,0.8,0.7 --svg plan.svg -o json",
        name="plan",
    )(show_plan)


async def show_plan(
    click: typer.Context,
    connection: ConnectionOptions,
    pair: PairOptions,
    output: OutputOptions,
    verify_ms: Annotated[
        float | None,
        typer.Option(help="Step of the target with one row, in ms. Without it, ask the coordinator."),
    ] = None,
    draft_step_ms: Annotated[
        float | None, typer.Option(help="Step of the draft with one row, in ms.")
    ] = None,
    acceptance: Annotated[
        str | None,
        typer.Option(
            help="Conditional acceptance rate at each position; the last one holds for all after it."
        ),
    ] = None,
    round_trip_ms: Annotated[float, typer.Option(help="Question to a service and its answer, in ms.")] = 0.0,
    per_8_rows: Annotated[
        float, typer.Option(help="Share by which a step takes longer for each 8 rows more.")
    ] = PER_8_ROWS,
    batch: Annotated[str, typer.Option(help="Requests at once, for instance 1,8,32.")] = "1",
    max_tokens: Annotated[int, typer.Option(min=1, max=128, help="Longest proposal.")] = MAX_TOKENS,
    svg_file: Annotated[
        Path | None, typer.Option("--svg", help="Write a chart of speed-up by proposal length.")
    ] = None,
) -> None:
    """Show the gain of speculation at each proposal length, the best length, and what would help most.

    The step times come from the options, from models that are measured on this machine (--target, --draft), or from the
    measurements of a running coordinator. The speed-up is over the
    target alone: (1 + E[accepted(K)]) x round of the target alone / round with K proposed tokens. The column without
    the wire is the usual formula (1 + E[accepted]) / (cost_draft x K + cost_verify).
    """
    if pair.is_named:
        if verify_ms is not None:
            raise ConfigurationError(
                "--verify-ms was given with --target or --draft; give the step times or a pair to measure"
            )
        measured = await measured_pair(pair, _sizes(batch), max_tokens)
        plans = {f"batch {size}": plan(times, size, max_tokens) for size, times in measured.items()}
    elif verify_ms is None:
        plans = await _measured_plans(connection, click)
    else:
        times = _step_times(verify_ms, draft_step_ms, acceptance, round_trip_ms, per_8_rows)
        plans = {f"batch {size}": plan(times, size, max_tokens) for size in _sizes(batch)}
    if svg_file is not None:
        svg_file.write_text(svg(plans), encoding="utf-8")
    output.show(_described(plans), lambda: plan_view(plans))


async def _measured_plans(connection: ConnectionOptions, click: typer.Context) -> dict[str, BatchPlan]:
    """Plans from a coordinator's measurements, by rule, temperature and batch size.

    Raises:
        NotFoundError: the coordinator has measured no rounds yet.
    """
    async with admin_client(connection, click) as client:
        decisions = (await client.stats()).decisions
    measured = [decision for decision in decisions if len(decision.round_seconds) > 1]
    # A plan adds up the times of draft and target. Rounds that draft ahead let them overlap.
    known = [decision for decision in measured if decision.ahead_outcomes is None] or measured
    if not known:
        raise NotFoundError(
            "the coordinator has measured no rounds yet; run requests, name a pair with --target and --draft, or give "
            "--verify-ms, --draft-step-ms and --acceptance"
        )
    return {
        f"{decision.rule}, temperature {decision.temperatures}, batch {decision.load}": plan(
            measured_times(decision), decision.load, len(decision.round_seconds) - 1
        )
        for decision in known
    }


def _step_times(
    verify_ms: float,
    draft_step_ms: float | None,
    acceptance: str | None,
    round_trip_ms: float,
    per_8_rows: float,
) -> StepTimes:
    """Step times and acceptance from the options of the command line.

    Raises:
        ConfigurationError: an option is missing or out of range.
    """
    if draft_step_ms is None or acceptance is None:
        raise ConfigurationError(
            "--verify-ms was given without --draft-step-ms and --acceptance; give all three"
        )
    for name, value in (("--verify-ms", verify_ms), ("--draft-step-ms", draft_step_ms)):
        if not 0.0 < value < 1e7:
            raise ConfigurationError(f"{name} is {value:g}; it must be above 0")
    for name, value in (("--round-trip-ms", round_trip_ms), ("--per-8-rows", per_8_rows)):
        if not 0.0 <= value < 1e7:
            raise ConfigurationError(f"{name} is {value:g}; it must be at least 0")
    return StepTimes(
        verify_ms / 1e3, draft_step_ms / 1e3, _rates(acceptance), round_trip_ms / 1e3, per_8_rows
    )


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0.0 <= rate <= 1.0 for rate in rates):
        raise ConfigurationError(
            f"--acceptance is {text}; it must be rates between 0 and 1 with commas between them"
        )
    return rates


def _sizes(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and 0 < int(part) <= 4096 for part in parts):
        raise ConfigurationError(
            f"--batch is {text}; it must be numbers from 1 to 4096 with commas between them"
        )
    return [int(part) for part in parts]


def _described(plans: dict[str, BatchPlan]) -> list[dict[str, Any]]:
    return [
        {
            "of": name,
            "batch": found.batch,
            "best_tokens": found.best_tokens,
            "best_speedup": round(found.best_speedup, 4),
            "break_even_acceptance": found.break_even_acceptance,
            "remedies": [{"remedy": remedy, "speedup": round(gain, 4)} for remedy, gain in found.remedies],
            "lengths": found.rows,
        }
        for name, found in plans.items()
    ]


def plan_view(plans: dict[str, BatchPlan]) -> RenderableType:
    """A table for each batch, and what follows from it."""
    parts: list[RenderableType] = []
    for name, found in plans.items():
        parts += [_table(name, found), *_words(found), ""]
    return Group(*parts[:-1])


def _table(name: str, found: BatchPlan) -> Table:
    table = plain_table(">K", ">TOKENS/PASS", ">ROUND", ">SPEED-UP", ">WITHOUT THE WIRE", "")
    table.title, table.title_justify, table.title_style = name, "left", "bold"
    for row in found.rows:
        table.add_row(
            str(row.tokens),
            f"{row.tokens_per_pass:.2f}",
            f"{row.round_seconds * 1e3:.2f} ms",
            f"{row.speedup:.2f}x",
            f"{row.speedup_without_wire:.2f}x",
            "best" if row.tokens == found.best_tokens else "",
        )
    return table


def _words(found: BatchPlan) -> list[str]:
    best = (
        f"{found.best_speedup:.2f}x with K = {found.best_tokens}" if found.best_tokens else "the target alone"
    )
    break_even = found.break_even_acceptance
    pays = (
        "drafting does not pay at any acceptance"
        if break_even is None
        else f"drafting pays from an acceptance of {percent(break_even)} at every position"
    )
    help_words = ", ".join(f"{remedy} {gain:.2f}x" for remedy, gain in found.remedies)
    return [f"best: {best}; {pays}", f"what would help, the most helpful first: {help_words}"]
