"""The public import name of `Client`; `tandem.clients.aio` holds it."""

from tandem.clients.aio import Client

__all__ = ["Client"]
