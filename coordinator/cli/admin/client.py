"""The client of admin commands."""

from __future__ import annotations

import typer

from coordinator.cli.connection import ConnectionOptions, connect
from tandem.admin_client import DEFAULT_TIMEOUT_SECONDS, AdminClient


def admin_client(options: ConnectionOptions, click: typer.Context) -> AdminClient:
    """A client for the coordinator of these options.

    Raises:
        ConfigurationError: an option is invalid.
    """
    connection = connect(options, click)
    return AdminClient(
        connection.address, connection.credentials, connection.timeout_seconds or DEFAULT_TIMEOUT_SECONDS
    )
