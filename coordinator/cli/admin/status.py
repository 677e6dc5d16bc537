"""`tandem admin status`: one screen."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from coordinator.cli.admin.client import admin_client
from coordinator.cli.admin.replicas import reasons, replica_table
from coordinator.cli.admin.views import ahead_words, duration, percent, plural
from coordinator.cli.command import OutputOptions, command
from coordinator.cli.connection import ConnectionOptions
from coordinator.stats.speculation import acceptance_length, acceptance_rate
from tandem.admin import CoordinatorState, Load, SpeculationSettings, Status, Throughput
from tandem.speculation_state import SpeculationDecision, SpeculationState
from tandem.types import SpeculationStats

MAX_DECISIONS = 12
"""Maximum number of decisions shown with their reasons."""

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
    facts.add_row("speculation", speculation_words(status.speculation_state, status.settings))
    facts.add_row("load", load_words(status.load))
    facts.add_row("throughput", throughput_words(status.throughput))
    facts.add_row("acceptance", acceptance_words(status.speculation))
    add_ahead_row(facts, status.speculation)
    replicas = replica_table(status.replicas)
    return Group(head, "", facts, "", replicas, *reasons(status.replicas), *decision_lines(status.decisions))


def fact_table() -> Table:
    """Names and what they stand for."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    return table


def speculation_words(state: SpeculationState, settings: SpeculationSettings | None = None) -> str:
    """Describe the state of speculation and, with the settings, the rule for new requests."""
    if not state.is_on:
        return f"off: {state.explanation}"
    words = f"on, {plural(state.num_speculative_tokens, 'token')} proposed per round"
    rule = "" if settings is None else f", rule {settings.rule}"
    return f"{words}{rule}; {state.explanation}" if state.explanation else words + rule


def decision_lines(decisions: Sequence[SpeculationDecision]) -> list[RenderableType]:
    """How much is proposed at each load, and why; nothing before there was any."""
    if not decisions:
        return []
    ordered = sorted(decisions, key=_order)
    lines = [
        f"{decision.rule}, temperature {decision.temperatures}, {decision.reason}" for decision in ordered
    ]
    shown = lines[:MAX_DECISIONS]
    if len(lines) > len(shown):
        shown.append(f"and {len(lines) - len(shown)} more (-o json)")
    return ["", Text("proposal length by load", style="dim"), *shown]


def _order(decision: SpeculationDecision) -> tuple[str, str, int, bool]:
    return decision.rule, decision.temperatures, decision.load, decision.ahead_outcomes is not None


def load_words(load: Load) -> str:
    """How much is being done."""
    return f"{load.running:,} running, {load.queued:,} waiting"


def throughput_words(throughput: Throughput) -> str:
    """How fast."""
    return (
        f"{throughput.last_10_seconds:,.1f} tokens/s over 10 s, {throughput.last_60_seconds:,.1f} over 60 s"
    )


def acceptance_words(stats: SpeculationStats) -> str:
    """Gain of speculation."""
    if not stats.drafted:
        return "nothing proposed yet"
    return (
        f"{percent(acceptance_rate(stats))} of {plural(stats.drafted, 'proposed token')}, "
        f"acceptance length {acceptance_length(stats):.2f}"
    )


def add_ahead_row(facts: Table, stats: SpeculationStats) -> None:
    """Add what drafting ahead did, if any round awaited it."""
    if stats.ahead.awaited:
        facts.add_row("drafted ahead", ahead_words(stats.ahead))
