"""`tandem admin health`: one word and an exit code, for scripts and probes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Annotated

import typer

from coordinator.cli.admin.client import admin_client
from coordinator.cli.admin.views import plural
from coordinator.cli.command import UNHEALTHY, OutputOptions, command
from coordinator.cli.connection import ConnectionOptions
from tandem.admin import Status
from tandem.admin_client import AdminClient
from tandem.errors import PermissionDeniedError, ServiceUnavailableError, UnauthenticatedError
from tandem.replica import ReplicaState, Role

_POLL_SECONDS = 0.2
_WAIT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Health:
    """True if a coordinator takes requests and can complete them."""

    healthy: bool
    serving: bool
    """By the standard health protocol."""
    state: str
    """Findings of the coordinator itself; empty where the token does not permit asking."""
    targets_ready: int | None
    drafts_ready: int | None

    def __str__(self) -> str:
        words = [self.state or ("serving" if self.serving else "not serving")]
        if self.state and not self.serving:
            words.append("not serving")
        if self.targets_ready is not None:
            words.append(f"{plural(self.targets_ready, 'target')} ready")
        if self.drafts_ready is not None:
            words.append(f"{plural(self.drafts_ready, 'draft')} ready")
        return f"{'healthy' if self.healthy else 'unhealthy'}: {', '.join(words)}"


def add_to(admin: typer.Typer) -> None:
    """Add the command to its group."""
    command(
        admin, "tandem admin health", "tandem admin health --wait --timeout 120 && tandem generate 'Hello'"
    )(health)


async def health(
    click: typer.Context,
    connection: ConnectionOptions,
    output: OutputOptions,
    wait: Annotated[
        bool, typer.Option("--wait", help="Ask until it is healthy, for --timeout seconds. [default: 60]")
    ] = False,
) -> None:
    """Check whether requests can be completed.

    Exits 0 when they can, 3 when they cannot, 4 when the coordinator cannot be reached. Where an admin token is needed
    but missing, the command uses the standard health protocol.
    """
    async with admin_client(connection, click) as client:
        found = await (_waited(client, connection.timeout or _WAIT_SECONDS) if wait else ask(client))
    output.show(found, lambda: str(found))
    if not found.healthy:
        raise typer.Exit(UNHEALTHY)


async def ask(client: AdminClient) -> Health:
    """Its health now.

    Raises:
        ServiceUnavailableError: it cannot be reached.
    """
    serving = await client.is_serving()
    try:
        status = await client.status()
    except (UnauthenticatedError, PermissionDeniedError):
        return Health(serving, serving, "", None, None)
    return Health(
        healthy=serving and status.state.completes,
        serving=serving,
        state=status.state.value,
        targets_ready=_ready(status, Role.TARGET),
        drafts_ready=_ready(status, Role.DRAFT),
    )


async def _waited(client: AdminClient, seconds: float) -> Health:
    """Wait until the coordinator is healthy or the time is up; the last health."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            found = await ask(client)
            if found.healthy or time.monotonic() > deadline:
                return found
        except ServiceUnavailableError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(_POLL_SECONDS)


def _ready(status: Status, role: Role) -> int:
    return sum(shot.role is role and shot.state is ReplicaState.READY for shot in status.replicas)
