"""The public import name of `AdminClient`; `tandem.clients.admin` holds it."""

from tandem.clients.admin import AdminClient

__all__ = ["AdminClient"]
