"""`tandem context`: names for coordinators, in place of their addresses."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from coordinator.cli.command import command, new_app
from coordinator.cli.connection import ConnectionSettings, is_by_hand
from coordinator.cli.contexts.file import read_contexts
from coordinator.cli.output import OutputOptions, plain_table
from tandem.clients.aio import DEFAULT_ADDRESS
from tandem.errors import ConfigurationError

context = new_app(
    "Name coordinators, and choose the one for commands.\n\n"
    "Contexts are kept in ~/.config/tandem/config.yaml ($XDG_CONFIG_HOME). Options of a command and the environment "
    "are stronger than the current context; a context named with --context is stronger than the environment."
)

Name = Annotated[str, typer.Argument(help="The context's name.")]


@command(context, "tandem context list", name="list")
def list_contexts(output: OutputOptions) -> None:
    """List the contexts; the current one is marked."""
    contexts = read_contexts()
    entries: list[dict[str, Any]] = [
        {
            "name": name,
            "current": name == contexts.current,
            **{k: v for k, v in values.items() if k != "token"},
        }
        for name, values in contexts.by_name.items()
    ]
    output.show(entries, lambda: _table(entries))


@command(context, "tandem context use staging")
def use(name: Name) -> None:
    """Make a context the current one."""
    contexts = read_contexts()
    contexts.get(name)
    contexts.current = name
    contexts.save()


@command(
    context,
    "tandem context set local --address 127.0.0.1:50051",
    "tandem context set staging --address staging.example.org:50051 --tls-ca-file ca.pem --token-file token",
    name="set",
)
def set_context(name: Name, settings: ConnectionSettings, click: typer.Context) -> None:
    """Create a context, or change the given options of one. The first one becomes the current one."""
    contexts = read_contexts()
    changes = {key: _kept(value) for key, value in asdict(settings).items() if is_by_hand(click, key)}
    if not changes:
        raise ConfigurationError("nothing was given to set; give at least --address")
    contexts.by_name[name] = contexts.by_name.get(name, {}) | changes
    contexts.current = contexts.current or name
    contexts.save()


@command(context, "tandem context delete staging")
def delete(name: Name) -> None:
    """Forget a context."""
    contexts = read_contexts()
    contexts.get(name)
    del contexts.by_name[name]
    if contexts.current == name:
        contexts.current = ""
    contexts.save()


def _kept(value: object) -> object:
    """Convert to the file's form, with absolute paths."""
    return str(value.expanduser().absolute()) if isinstance(value, Path) else value


def _table(entries: list[dict[str, Any]]) -> Table:
    table = plain_table("", "NAME", "ADDRESS", "TLS", "TOKEN")
    for entry in entries:
        by_tls = entry.get("tls") or "tls_ca_file" in entry or "tls_cert_file" in entry
        table.add_row(
            "*" if entry["current"] else "",
            entry["name"],
            entry.get("address", DEFAULT_ADDRESS),
            "yes" if by_tls else "no",
            entry.get("token_file", ""),
        )
    return table
