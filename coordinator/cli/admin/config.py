"""`tandem admin config`: shows and changes the configuration of a running coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from coordinator.cli.admin.client import admin_client
from coordinator.cli.command import OutputOptions, command, new_app, plain_table
from coordinator.cli.connection import ConnectionOptions
from tandem.admin import ConfigOption
from tandem.config.layers import Origin
from tandem.config.rule import spelled
from tandem.errors import ConfigurationError, NotFoundError

config = new_app("Show and change the live configuration.")


@command(
    config,
    "tandem admin config show",
    "tandem admin config show num_speculative_tokens",
    "tandem admin config show --live -o json",
)
async def show(
    click: typer.Context,
    connection: ConnectionOptions,
    output: OutputOptions,
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY]...", help="Only these options.")] = None,
    live: Annotated[bool, typer.Option("--live", help="Only options that can be changed.")] = False,
) -> None:
    """Show every option, its value, and where the value comes from."""
    async with admin_client(connection, click) as client:
        options = await client.config()
    names = [key.replace("-", "_") for key in keys or ()]
    unknown = [name for name in names if all(option.name != name for option in options)]
    if unknown:
        raise NotFoundError(f"there is no option {', '.join(unknown)}")
    shown = [
        option for option in options if (not names or option.name in names) and (option.is_live or not live)
    ]
    output.show(shown, lambda: option_table(shown))


@command(
    config,
    "tandem admin config set num_speculative_tokens 6",
    "tandem admin config set speculation false",
    "tandem admin config set rejection_sampling_strategy synthetic synthetic_acceptance_rate 0.7",
    name="set",
)
async def set_options(
    words: Annotated[list[str], typer.Argument(metavar="KEY VALUE...", help="Options and their values.")],
    click: typer.Context,
    connection: ConnectionOptions,
    output: OutputOptions,
) -> None:
    """Change options for new requests; running requests keep theirs.

    Several options change together or not at all. null unsets an optional option. The coordinator checks the same rules
    as at its start, and logs each change with its caller.
    """
    values = pairs(words)
    async with admin_client(connection, click) as client:
        changed = await client.update_config(values)
    output.show(changed, lambda: option_table(changed))


@command(config, "tandem admin config reset num_speculative_tokens")
async def reset(
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="Options.")],
    click: typer.Context,
    connection: ConnectionOptions,
    output: OutputOptions,
) -> None:
    """Give options the values again that the coordinator started with."""
    async with admin_client(connection, click) as client:
        changed = await client.update_config({}, keys)
    output.show(changed, lambda: option_table(changed))


def pairs(words: Sequence[str]) -> dict[str, str]:
    """KEY VALUE KEY VALUE ..., or KEY=VALUE.

    Raises:
        ConfigurationError: the last key has no value.
    """
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        key, equals, value = rest.pop(0).partition("=")
        if not equals:
            if not rest:
                raise ConfigurationError(f"{key} has no value; give KEY VALUE, or several of such pairs")
            value = rest.pop(0)
        found[key] = value
    return found


def option_table(shown: Sequence[ConfigOption]) -> Table:
    """A row for each."""
    table = plain_table("OPTION", "VALUE", "FROM")
    for option in shown:
        table.add_row(option.name, "" if option.value is None else _value(option.value), origin(option))
    return table


def origin(option: ConfigOption) -> str:
    """Origin of its value, in words."""
    if option.origin is not Origin.LIVE or option.changed_at is None:
        return option.origin.value
    return f"live at {option.changed_at:%H:%M:%S} by {option.changed_by}"


def _value(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else spelled(value)
