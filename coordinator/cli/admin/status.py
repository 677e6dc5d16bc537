"""`tandem admin status`: one screen."""

from __future__ import annotations

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from coordinator.cli.admin.client import admin_client
from coordinator.cli.admin.replicas import reasons, replica_table
from coordinator.cli.admin.words import duration, percent, plural
from coordinator.cli.command import command
from coordinator.cli.connection import ConnectionOptions
from coordinator.cli.output import OutputOptions
from coordinator.figures import acceptance_rate, accepted_per_verification
from tandem.admin import CoordinatorState, Load, SpeculationSettings, Status, Throughput
from tandem.types import SpeculationFigures

_STYLES = {
    CoordinatorState.READY: "green",
    CoordinatorState.STARTING: "yellow",
    CoordinatorState.DEGRADED: "yellow",
    CoordinatorState.UNAVAILABLE: "red",
}


def add_to(admin: typer.Typer) -> None:
    """Add the command to its group."""
    command(admin, "tandem admin status", "tandem admin status --address 10.0.0.5:50051 -o json")(status)


async def status(click: typer.Context, connection: ConnectionOptions, output: OutputOptions) -> None:
    """Show replicas, load, acceptance and throughput."""
    async with admin_client(connection, click) as client:
        found = await client.status()
    output.show(found, lambda: status_view(found, client.address))


def status_view(status: Status, address: str) -> RenderableType:
    """The whole screen."""
    head = Text.assemble(
        ("tandem ", "bold"),
        (status.version, "bold"),
        f"  {address}  ",
        (status.state.value, _STYLES[status.state]),
        f"  up {duration(status.uptime_seconds)}",
    )
    facts = fact_table()
    facts.add_row("model", status.model or "not known yet")
    facts.add_row("speculation", speculation_words(status.settings))
    facts.add_row("load", load_words(status.load))
    facts.add_row("throughput", throughput_words(status.throughput))
    facts.add_row("acceptance", acceptance_words(status.speculation))
    return Group(head, "", facts, "", replica_table(status.replicas), *reasons(status.replicas))


def fact_table() -> Table:
    """Names and what they stand for."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    return table


def speculation_words(settings: SpeculationSettings) -> str:
    """What a new request gets."""
    if not settings.is_on:
        return "off: the target alone"
    return f"{plural(settings.num_speculative_tokens, 'token')} per round, rule {settings.rule}"


def load_words(load: Load) -> str:
    """How much is being done."""
    return f"{load.running:,} running, {load.queued:,} waiting"


def throughput_words(throughput: Throughput) -> str:
    """How fast."""
    return (
        f"{throughput.last_10_seconds:,.1f} tokens/s over 10 s, {throughput.last_60_seconds:,.1f} over 60 s"
    )


def acceptance_words(figures: SpeculationFigures) -> str:
    """What speculation gains."""
    if not figures.drafted:
        return "nothing proposed yet"
    return (
        f"{percent(acceptance_rate(figures))} of {plural(figures.drafted, 'proposed token')}, "
        f"{accepted_per_verification(figures):.2f} per round"
    )
