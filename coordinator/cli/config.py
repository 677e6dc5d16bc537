"""`tandem config`: what the coordinator would run with, where each value comes from, and whether it may."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from coordinator.cli.command import new_app
from coordinator.settings import ConfigSettings
from tandem.config.layers import Origin, merged, origins, read_layers
from tandem.config.rule import spelled
from tandem.errors import ConfigurationError
from tandem.settings import sentences

config = new_app("Show or check the configuration.")

_PROGRAM = "tandem config show"
_BROKEN = 2
"""Exit code: as for every command that is not given what it needs."""


@config.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def show(context: typer.Context) -> None:
    """Print every option of the coordinator, its value and where that comes from; --json for one JSON object.

    Takes the options of `tandem serve coordinator`, and reads the same environment and config file.
    """
    arguments = [word for word in context.args if word != "--json"]
    settings, found = _read(arguments, os.environ)
    _write(settings, found, as_json=len(arguments) < len(context.args))


@config.command()
def check(
    file: Annotated[Path, typer.Argument(help="TOML or YAML file.")],
    section_name: Annotated[str | None, typer.Option(help="Section that holds the options.")] = None,
) -> None:
    """Check a config file alone, without a service. Exits 0, or 2 with one line for each broken rule."""
    section = [] if section_name is None else ["--section-name", section_name]
    _read(["--config-file", str(file), *section], {})
    sys.stdout.write(f"{file}: ok\n")


def _read(arguments: list[str], environment: Mapping[str, str]) -> tuple[ConfigSettings, dict[str, Origin]]:
    """The settings and their origins; ends the command with a line for each thing that is wrong."""
    try:
        layers = read_layers(ConfigSettings, arguments, environment, _PROGRAM)
        return ConfigSettings(**merged(layers)), origins(layers)
    except ValidationError as error:
        _refuse(sentences(error))
    except ConfigurationError as error:
        _refuse([str(error)])


def _refuse(broken: list[str]) -> NoReturn:
    for sentence in broken:
        sys.stderr.write(f"error: {sentence}\n")
    raise typer.Exit(_BROKEN)


def _write(settings: ConfigSettings, found: dict[str, Origin], *, as_json: bool) -> None:
    values = settings.model_dump(mode="json")
    told = {name: (value, found.get(name, Origin.DEFAULT)) for name, value in values.items()}
    if as_json:
        entries = {name: {"value": value, "from": origin} for name, (value, origin) in told.items()}
        sys.stdout.write(json.dumps(entries, indent=2) + "\n")
        return
    table = Table("option", "value", "from", box=None, pad_edge=False, header_style="bold")
    for name, (value, origin) in told.items():
        table.add_row(name, "" if value is None else spelled(value), origin)
    Console(highlight=False, soft_wrap=True).print(table)
