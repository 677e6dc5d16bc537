"""The client that admin commands speak through."""

from __future__ import annotations

import typer

from coordinator.cli.connection import ConnectionOptions, connect
from tandem.admin_client import DEFAULT_TIMEOUT_SECONDS, AdminClient


def admin_client(options: ConnectionOptions, click: typer.Context) -> AdminClient:
    """A client for the coordinator that the options name.

    Raises:
        ConfigurationError: an option cannot be what it is.
    """
    connection = connect(options, click)
    return AdminClient(
        connection.address, connection.credentials, connection.timeout_seconds or DEFAULT_TIMEOUT_SECONDS
    )
