"""The public import name of `SyncClient`; `tandem.clients.sync` holds it."""

from tandem.clients.sync import SyncClient

__all__ = ["SyncClient"]
