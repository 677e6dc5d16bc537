"""Shell completion for replicas and requests. A failing suggestion must never disturb the shell."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import fields

import typer

from coordinator.cli.admin.views import plural
from coordinator.cli.connection import ConnectionOptions, connect
from tandem.admin_client import AdminClient
from tandem.errors import TandemError

_PATIENCE_SECONDS = 1.0


def replica_addresses(click: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Addresses of replicas, each with its role and state."""

    async def ask(client: AdminClient) -> list[tuple[str, str]]:
        return [(shot.address, f"{shot.role.value}, {shot.state.value}") for shot in await client.replicas()]

    return _suggested(click, incomplete, ask)


def request_ids(click: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Ids of running requests, each with how far it is."""

    async def ask(client: AdminClient) -> list[tuple[str, str]]:
        return [
            (report.request_id, plural(report.completion_tokens, "token"))
            for report in await client.requests()
        ]

    return _suggested(click, incomplete, ask)


def _suggested(
    click: typer.Context,
    incomplete: str,
    ask: Callable[[AdminClient], Awaitable[Iterable[tuple[str, str]]]],
) -> list[tuple[str, str]]:
    async def answer() -> list[tuple[str, str]]:
        given = {
            field.name: click.params.get(field.name)
            for field in fields(ConnectionOptions)
            if field.name in click.params
        }
        connection = connect(ConnectionOptions(**given), click)
        async with AdminClient(connection.address, connection.credentials, _PATIENCE_SECONDS) as client:
            return [entry for entry in await ask(client) if entry[0].startswith(incomplete)]

    try:
        return asyncio.run(answer())
    except TandemError:
        return []
