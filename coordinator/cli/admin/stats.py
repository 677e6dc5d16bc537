"""`tandem admin stats`: statistics since the start, or live."""

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
from coordinator.cli.admin.status import (
    acceptance_words,
    add_ahead_row,
    decision_lines,
    fact_table,
    load_words,
    speculation_words,
    throughput_words,
)
from coordinator.cli.admin.views import bar, duration, percent, plural
from coordinator.cli.command import OutputForm, OutputOptions, command, plain_table
from coordinator.cli.connection import ConnectionOptions
from coordinator.stats.speculation import (
    acceptance_length,
    acceptance_rate,
    conditional_rates,
    cumulative_rates,
    since,
    tokens_per_pass,
)
from tandem.admin import Outcomes, Stats
from tandem.admin_client import AdminClient
from tandem.types import AheadStats, SpeculationStats

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

    The statistics begin with the coordinator's start. --watch updates them until Ctrl-C, and shows acceptance at each
    position since the last update. With it, JSON is one object per line and YAML one document per update.
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
    facts.add_row(
        "completed",
        f"{plural(stats.completion_tokens, 'token')} in {plural(stats.speculation.rounds, 'round')}",
    )
    facts.add_row("speculation", speculation_words(stats.speculation_state))
    facts.add_row("acceptance", acceptance_words(stats.speculation))
    add_ahead_row(facts, stats.speculation)
    recent = None if before is None else since(stats.speculation, before.speculation)
    if recent is not None:
        facts.add_row("last look", acceptance_words(recent) if recent.drafted else "nothing proposed since")
    parts: list[RenderableType] = [facts]
    if stats.speculation.positions:
        # While nothing happens, show the last activity.
        shown = recent if recent is not None and recent.drafted else stats.speculation
        when = "since the last look" if shown is recent else "since the start"
        parts += ["", position_table(shown, when)]
        if shown.ahead.awaited:
            parts += ["", rank_table(shown.ahead, when)]
    if stats.by_rule:
        parts += ["", rule_table(stats.by_rule)]
    parts += decision_lines(stats.decisions)
    return Group(*parts)


def outcome_words(outcomes: Outcomes) -> str:
    """How requests ended."""
    return (
        f"{outcomes.completed:,} completed, {outcomes.failed:,} failed, "
        f"{outcomes.cancelled:,} cancelled, {outcomes.aborted:,} aborted"
    )


def position_table(counts: SpeculationStats, when: str) -> Table:
    """Cumulative and conditional acceptance at each position of a proposal."""
    table = plain_table("POS", ">CUMULATIVE", "", ">CONDITIONAL", "")
    table.title, table.title_justify, table.title_style = f"accepted {when}", "left", "dim"
    pairs = zip(cumulative_rates(counts), conditional_rates(counts), strict=True)
    for number, (cumulative, conditional) in enumerate(pairs, start=1):
        table.add_row(
            str(number),
            percent(cumulative),
            f"[green]{bar(cumulative, _WIDEST_BAR):{_WIDEST_BAR}}[/]",
            percent(conditional),
            f"[cyan]{bar(conditional, _WIDEST_BAR):{_WIDEST_BAR}}[/]",
        )
    return table


def rank_table(ahead: AheadStats, when: str) -> Table:
    """Rounds whose outcome was among the first 1, 2, 4, ... that the draft drafted for: what a smaller budget gives."""
    table = plain_table("OUTCOMES", ">HITS", ">OF ROUNDS", "")
    table.title, table.title_justify, table.title_style = f"drafted ahead {when}", "left", "dim"
    count = 1
    while True:
        hits = sum(ahead.hits_by_rank[:count])
        share = hits / ahead.awaited
        table.add_row(
            str(count), f"{hits:,}", percent(share), f"[green]{bar(share, _WIDEST_BAR):{_WIDEST_BAR}}[/]"
        )
        if count >= len(ahead.hits_by_rank):
            return table
        count *= 2


def rule_table(by_rule: Mapping[str, SpeculationStats]) -> Table:
    """Statistics by acceptance rule. The acceptance length is MAX's; tokens per pass is one more."""
    table = plain_table("RULE", ">ROUNDS", ">PROPOSED", ">ACCEPTED", ">RATE", ">ACC. LENGTH", ">TOKENS/PASS")
    for rule, counts in by_rule.items():
        table.add_row(
            rule,
            f"{counts.rounds:,}",
            f"{counts.drafted:,}",
            f"{counts.accepted:,}",
            percent(acceptance_rate(counts)) if counts.drafted else "-",
            f"{acceptance_length(counts):.2f}",
            f"{tokens_per_pass(counts):.2f}",
        )
    return table
