"""Clients of a coordinator: for completions, with and without async, and for administration."""

from tandem.clients.admin_client import AdminClient
from tandem.clients.client import Client
from tandem.clients.sync_client import SyncClient

__all__ = ["AdminClient", "Client", "SyncClient"]
