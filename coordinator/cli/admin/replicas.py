"""`tandem admin replicas`: lists, shows, drains and resumes drafts and targets."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from coordinator.cli.admin.client import admin_client
from coordinator.cli.admin.completion import replica_addresses
from coordinator.cli.admin.views import NOTHING, ahead_words, duration, milliseconds, percent, plural, state
from coordinator.cli.command import OutputOptions, command, new_app, plain_table
from coordinator.cli.connection import ConnectionOptions
from coordinator.stats.speculation import acceptance_length, acceptance_rate
from tandem.errors import ConfigurationError, NotFoundError, TandemError
from tandem.replica import ReplicaSnapshot, ReplicaState, is_last_target

replicas = new_app("List, show, drain and resume replicas.")

Address = Annotated[
    str,
    typer.Argument(metavar="ADDRESS", help="host:port, as in the list.", autocompletion=replica_addresses),
]


@command(replicas, "tandem admin replicas list", "tandem admin replicas list -o yaml", name="list")
async def list_replicas(click: typer.Context, connection: ConnectionOptions, output: OutputOptions) -> None:
    """List every replica: its state, its load, and what became of its proposals."""
    async with admin_client(connection, click) as client:
        found = await client.replicas()
    output.show(found, lambda: Group(replica_table(found), *reasons(found)))


@command(replicas, "tandem admin replicas show 10.0.0.7:50053")
async def show(
    replica: Address, click: typer.Context, connection: ConnectionOptions, output: OutputOptions
) -> None:
    """Show a replica and its model."""
    async with admin_client(connection, click) as client:
        found = _named(replica, await client.replicas())
    output.show(found, lambda: replica_view(found))


@command(
    replicas, "tandem admin replicas drain 10.0.0.7:50053", "tandem admin replicas drain 10.0.0.7:50053 --yes"
)
async def drain(
    replica: Address,
    click: typer.Context,
    connection: ConnectionOptions,
    output: OutputOptions,
    yes: Annotated[bool, typer.Option("--yes", help="Drain the last target without a question.")] = False,
) -> None:
    """Send no new sequences to a replica; its own move to another one, or finish there.

    Without any other target requests wait and then fail, so draining the last one needs confirmation.
    """
    async with admin_client(connection, click) as client:
        known = await client.replicas()
        is_last = is_last_target(_named(replica, known), known)
        if is_last and not yes:
            _confirm(replica)
        drained = await client.drain(replica, allow_last_target=is_last)
    output.show(drained, lambda: replica_table([drained]))


@command(replicas, "tandem admin replicas resume 10.0.0.7:50053")
async def resume(
    replica: Address, click: typer.Context, connection: ConnectionOptions, output: OutputOptions
) -> None:
    """Give a drained replica new sequences again."""
    async with admin_client(connection, click) as client:
        resumed = await client.resume(replica)
    output.show(resumed, lambda: replica_table([resumed]))


def _named(address: str, known: Sequence[ReplicaSnapshot]) -> ReplicaSnapshot:
    found = next((replica for replica in known if replica.address == address), None)
    if found is None:
        there = ", ".join(replica.address for replica in known) or "none"
        raise NotFoundError(f"there is no replica {address!r}; there are: {there}")
    return found


def _confirm(address: str) -> None:
    """Ask for confirmation on stderr, since stdout is for the result.

    Raises:
        ConfigurationError: stdin is not a terminal.
        TandemError: the answer is no.
    """
    if not sys.stdin.isatty():
        raise ConfigurationError(
            f"{address} is the last target that takes new sequences; to drain it all the same, give --yes"
        )
    sys.stderr.write(
        f"{address} is the last target that takes new sequences: requests will wait and then fail. Drain it? [y/N] "
    )
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise TandemError("nothing was drained")


def replica_table(shown: Sequence[ReplicaSnapshot]) -> Table:
    """A row for each."""
    table = plain_table("ROLE", "ADDRESS", "STATE", ">FOR", ">SEQ", ">RTT", ">STEP", ">ACCEPT")
    for replica in shown:
        table.add_row(
            replica.role.value,
            replica.address,
            state(replica.state),
            duration(replica.since_seconds).partition(" ")[0],
            f"{replica.open_sequences:,}",
            milliseconds(replica.round_trip_seconds),
            milliseconds(replica.step_seconds),
            percent(replica.figures.accepted, replica.figures.drafted),
        )
    return table


def reasons(shown: Sequence[ReplicaSnapshot]) -> Iterator[RenderableType]:
    """Reasons why the others are not ready."""
    with_reason = [replica for replica in shown if replica.reason]
    if with_reason:
        yield ""
    for replica in with_reason:
        yield Text(f"{replica.role.value} {replica.address}: {replica.reason}", style="yellow")


def replica_view(replica: ReplicaSnapshot) -> RenderableType:
    """All of one."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in _facts(replica):
        table.add_row(name, value)
    return table


def _facts(replica: ReplicaSnapshot) -> Iterator[tuple[str, RenderableType]]:
    stats, model = replica.figures, replica.model
    yield "role", replica.role.value
    yield "address", replica.address
    yield "state", state(replica.state)
    if replica.reason or replica.state is not ReplicaState.READY:
        yield "reason", replica.reason or NOTHING
    yield "since", duration(replica.since_seconds)
    yield "sequences", f"{replica.open_sequences:,}"
    yield "round trip", milliseconds(replica.round_trip_seconds)
    yield "step", milliseconds(replica.step_seconds)
    yield "rounds", f"{stats.rounds:,}"
    yield "proposed", plural(stats.drafted, "token")
    yield "accepted", f"{plural(stats.accepted, 'token')} ({percent(acceptance_rate(stats))})"
    yield "acceptance length", f"{acceptance_length(stats):.2f}"
    if stats.ahead.awaited:
        yield "drafted ahead", ahead_words(stats.ahead)
    if model is None:
        return
    yield "model", model.name or NOTHING
    yield "architecture", model.architecture
    yield "parameters", f"{model.parameter_count:,}"
    yield "vocabulary", plural(model.vocabulary_size, "token")
    yield "tokenizer", model.tokenizer_hash[:12] or NOTHING
    yield "max_length", f"{model.max_length:,}"
    yield "dtype", model.dtype
    yield "version", model.service_version
