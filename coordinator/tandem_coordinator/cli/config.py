"""`tandem config`: shows and checks the configuration with which the coordinator would start."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Annotated

import typer
from pydantic import ValidationError

from tandem.config.options import sentences
from tandem.config.origin import Origin
from tandem.errors import ConfigurationError
from tandem.model.admin import ConfigOption
from tandem_coordinator.cli.command import OutputOptions, command
from tandem_coordinator.cli.main import CommandGroup, app
from tandem_coordinator.cli.views import options_view
from tandem_coordinator.settings.coordinator import ConfigSettings

config = CommandGroup("Show or check the configuration.", app, "config")


@command(
    config,
    "num_speculative_tokens draft_address",
    "--config-file tandem.toml -o json",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    options_metavar="[NAME]... [OPTIONS]",
)
def show(context: typer.Context, output: OutputOptions) -> None:
    """Print the coordinator's options, their values and where the values come from.

    Without a NAME, prints all options. Accepts the options of `tandem serve coordinator` (see its --help) as well, and
    reads the same environment and config file.
    """
    words = context.args
    count = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
    names = [word.replace("-", "_") for word in words[:count]]
    settings, found = _read(words[count:], os.environ)
    values = settings.model_dump(mode="json")
    if unknown := [name for name in names if name not in values]:
        raise ConfigurationError(f"there is no option {', '.join(unknown)}")
    origins_of = {name: found.get(name, Origin.DEFAULT) for name in names or values}
    output.show(
        {name: {"value": values[name], "from": str(origin)} for name, origin in origins_of.items()},
        lambda: options_view(
            [ConfigOption(name, values[name], origin, False) for name, origin in origins_of.items()]
        ),
    )


@command(
    config, "tandem.toml --section-name speculation", """'{"method": "ngram", "num_speculative_tokens": 4}'"""
)
def check(
    source: Annotated[
        str,
        typer.Argument(metavar="FILE|JSON", help="TOML, YAML or JSON file, or options as one JSON object."),
    ],
    section_name: Annotated[str | None, typer.Option(help="Section that holds the options.")] = None,
) -> None:
    """Check a config file or a JSON object alone, without a service.

    Exits 0, or 2 with one line for each broken rule.
    """
    option = "--speculative-config" if source.lstrip().startswith("{") else "--config-file"
    section = [] if section_name is None else ["--section-name", section_name]
    _read([option, source, *section], {})
    sys.stdout.write("ok\n" if option == "--speculative-config" else f"{source}: ok\n")


def _read(arguments: list[str], environment: Mapping[str, str]) -> tuple[ConfigSettings, dict[str, Origin]]:
    """The settings and their origins."""
    values, origins = ConfigSettings.read(arguments, environment, "tandem config show")
    try:
        return ConfigSettings(**values), origins
    except ValidationError as error:
        raise ConfigurationError("\nerror: ".join(sentences(error))) from None  # a line for each
