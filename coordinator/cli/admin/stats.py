"""`tandem admin stats`: what was done, and live what is being done."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import aclosing
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from coordinator.cli.admin.client import admin_client
from coordinator.cli.admin.status import acceptance_words, fact_table, load_words, throughput_words
from coordinator.cli.admin.words import bar, duration, percent
from coordinator.cli.command import command
from coordinator.cli.connection import ConnectionOptions
from coordinator.cli.output import OutputForm, OutputOptions, plain_table
from coordinator.figures import (
    acceptance_rate,
    accepted_per_verification,
    conditional_rates,
    cumulative_rates,
    mean_acceptance_length,
    since,
)
from tandem.admin import Outcomes, Stats
from tandem.admin_client import AdminClient
from tandem.types import SpeculationFigures

_WIDEST_BAR = 22


def add_to(admin: typer.Typer) -> None:
    """Add the command to its group."""
    command(
        admin,
        "tandem admin stats",
        "tandem admin stats --watch --interval 2",
        "tandem admin stats --watch --count 10 -o json",
    )(stats)


async def stats(
    click: typer.Context,
    connection: ConnectionOptions,
    output: OutputOptions,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(help="With --watch: seconds between two looks.")] = 1.0,
    count: Annotated[int | None, typer.Option(min=1, help="With --watch: end after so many looks.")] = None,
) -> None:
    """Show what speculation did; --watch: live.

    The figures are those since the coordinator's start. --watch goes on until Ctrl-C, and shows acceptance at each
    position as it was between the last two looks. With it, JSON is one object a line and YAML one document a look.
    """
    async with admin_client(connection, click) as client:
        if not watch:
            found = await client.stats()
            output.show(found, lambda: stats_view(found))
        else:
            await _watch(client, output, interval, count)


async def _watch(client: AdminClient, output: OutputOptions, interval: float, count: int | None) -> None:
    live = Live(console=Console(highlight=False), auto_refresh=False, vertical_overflow="crop")
    is_screen = output.output is OutputForm.TABLE and sys.stdout.isatty()
    before: Stats | None = None
    looks = 0
    if is_screen:
        live.start()
    try:
        async with aclosing(client.watch_stats(interval)) as answers:
            async for found in answers:
                view = stats_view(found, before)
                if is_screen:
                    live.update(view, refresh=True)
                else:
                    output.show_next(found, lambda view=view: view)  # type: ignore[misc]
                before, looks = found, looks + 1
                if looks == count:
                    break
    finally:
        live.stop()


def stats_view(stats: Stats, before: Stats | None = None) -> RenderableType:
    """One look; with the one before it, also what happened between the two."""
    facts = fact_table()
    facts.add_row("up", duration(stats.uptime_seconds))
    facts.add_row("load", load_words(stats.load))
    facts.add_row("requests", outcome_words(stats.outcomes))
    facts.add_row("throughput", throughput_words(stats.throughput))
    facts.add_row("completed", f"{stats.completion_tokens:,} tokens in {stats.speculation.rounds:,} rounds")
    facts.add_row("acceptance", acceptance_words(stats.speculation))
    recent = None if before is None else since(stats.speculation, before.speculation)
    if recent is not None:
        facts.add_row("last look", acceptance_words(recent) if recent.drafted else "nothing proposed since")
    parts: list[RenderableType] = [facts]
    if stats.speculation.positions:
        # While nothing happens, what was is shown.
        shown = recent if recent is not None and recent.drafted else stats.speculation
        parts += ["", position_table(shown, "since the last look" if shown is recent else "since the start")]
    if stats.by_rule:
        parts += ["", rule_table(stats.by_rule)]
    return Group(*parts)


def outcome_words(outcomes: Outcomes) -> str:
    """How requests ended."""
    return (
        f"{outcomes.completed:,} completed, {outcomes.failed:,} failed, "
        f"{outcomes.cancelled:,} cancelled, {outcomes.aborted:,} aborted"
    )


def position_table(figures: SpeculationFigures, when: str) -> Table:
    """Acceptance at each position of a proposal, both ways that it is counted."""
    table = plain_table("POS", ">CUMULATIVE", "", ">CONDITIONAL", "")
    table.title, table.title_justify, table.title_style = f"accepted {when}", "left", "dim"
    pairs = zip(cumulative_rates(figures), conditional_rates(figures), strict=True)
    for number, (cumulative, conditional) in enumerate(pairs, start=1):
        table.add_row(
            str(number),
            percent(cumulative),
            f"[green]{bar(cumulative, _WIDEST_BAR):{_WIDEST_BAR}}[/]",
            percent(conditional),
            f"[cyan]{bar(conditional, _WIDEST_BAR):{_WIDEST_BAR}}[/]",
        )
    return table


def rule_table(by_rule: Mapping[str, SpeculationFigures]) -> Table:
    """What speculation did under each acceptance rule. The acceptance length is MAX's, the mean one vLLM's."""
    table = plain_table("RULE", ">ROUNDS", ">PROPOSED", ">ACCEPTED", ">RATE", ">LENGTH", ">MEAN LENGTH")
    for rule, figures in by_rule.items():
        table.add_row(
            rule,
            f"{figures.rounds:,}",
            f"{figures.drafted:,}",
            f"{figures.accepted:,}",
            percent(acceptance_rate(figures)) if figures.drafted else "-",
            f"{accepted_per_verification(figures):.2f}",
            f"{mean_acceptance_length(figures):.2f}",
        )
    return table
