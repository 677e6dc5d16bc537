"""`tandem admin requests`: what runs now, and how to end it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table

from coordinator.cli.admin.client import admin_client
from coordinator.cli.admin.completion import request_ids
from coordinator.cli.admin.status import fact_table, speculation_words
from coordinator.cli.admin.views import NOTHING, duration, percent, plural
from coordinator.cli.command import OutputOptions, command, new_app, plain_table
from coordinator.cli.connection import ConnectionOptions
from tandem.admin import RequestReport

requests = new_app("List, show and abort running requests.")

RequestId = Annotated[
    str, typer.Argument(metavar="ID", help="The request's id, or its beginning.", autocompletion=request_ids)
]
_SHORT = 12


@command(requests, "tandem admin requests list", name="list")
async def list_requests(click: typer.Context, connection: ConnectionOptions, output: OutputOptions) -> None:
    """List the requests that run, the oldest first."""
    async with admin_client(connection, click) as client:
        found = await client.requests()
    output.show(found, lambda: request_table(found))


@command(requests, "tandem admin requests show 3f9c")
async def show(
    request_id: RequestId, click: typer.Context, connection: ConnectionOptions, output: OutputOptions
) -> None:
    """Show all that is known of a request that runs."""
    async with admin_client(connection, click) as client:
        found = await client.request(request_id)
    output.show(found, lambda: request_view(found))


@command(requests, "tandem admin requests abort 3f9c --reason 'making room'")
async def abort(
    request_id: RequestId,
    click: typer.Context,
    connection: ConnectionOptions,
    output: OutputOptions,
    reason: Annotated[str, typer.Option(help="Reason for its client.")] = "",
) -> None:
    """End a running request. Its client gets the status ABORTED and the reason; every service frees it."""
    async with admin_client(connection, click) as client:
        ended = await client.abort(request_id, reason)
    output.show(ended, lambda: request_table([ended]))


def request_table(shown: Sequence[RequestReport]) -> Table:
    """A row for each."""
    table = plain_table("ID", ">AGE", ">PROMPT", ">TOKENS", ">TOKENS/S", "RULE", ">K", ">ACCEPTED")
    for report in shown:
        table.add_row(
            report.request_id[:_SHORT],
            duration(report.age_seconds),
            f"{report.prompt_tokens:,}",
            f"{report.completion_tokens:,}",
            _speed(report),
            report.rule,
            str(report.num_speculative_tokens),
            percent(report.speculation.accepted, report.speculation.drafted),
        )
    return table


def request_view(report: RequestReport) -> RenderableType:
    """All of one."""
    table = fact_table()
    for name, value in _facts(report):
        table.add_row(name, value)
    return table


def _facts(report: RequestReport) -> Iterator[tuple[str, str]]:
    stats = report.speculation
    yield "id", report.request_id
    yield "age", duration(report.age_seconds)
    yield "prompt", plural(report.prompt_tokens, "token")
    yield "completion", f"{plural(report.completion_tokens, 'token')}, {_speed(report)} tokens/s"
    yield "rule", report.rule
    yield "K", f"{plural(report.num_speculative_tokens, 'token')} proposed per round"
    yield "target", report.target_address or NOTHING
    yield "draft", report.draft_address or NOTHING
    yield "speculation", speculation_words(report.speculation_state)
    yield "rounds", f"{stats.rounds:,}"
    yield (
        "accepted",
        f"{stats.accepted:,} of {stats.drafted:,} ({percent(stats.accepted, stats.drafted)})",
    )


def _speed(report: RequestReport) -> str:
    return f"{report.completion_tokens / report.age_seconds:.1f}" if report.age_seconds > 0 else NOTHING
