"""`tandem config`: shows and checks the configuration with which the coordinator would start."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ValidationError
from rich.table import Table

from coordinator.cli.app import Exit, new_app
from coordinator.cli.command import OutputForm, OutputOptions, command, errors_to_exit, plain_table
from coordinator.settings.coordinator import ConfigSettings
from tandem.config.layers import Origin, merged, origins, read_layers
from tandem.config.options import sentences
from tandem.config.rule import spelled
from tandem.errors import ConfigurationError

config = new_app("Show or check the configuration.")

_PROGRAM = "tandem config show"


@config.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def show(context: typer.Context) -> None:
    """Print the coordinator's options, their values and where the values come from.

    Usage: tandem config show [NAME]... [-o table|json|yaml] [OPTIONS]

    Without a NAME, prints all options. Accepts the options of `tandem serve coordinator`, and reads the same
    environment and config file.
    """
    if {"-h", "--help"} & {*context.args}:
        sys.stdout.write(f"{inspect.getdoc(show)}\n\n{_OPTIONS_ARE}")
        return
    with errors_to_exit():
        form, words = _output(context.args)
        names, arguments = _names(words)
    settings, found = _read(arguments, os.environ)
    with errors_to_exit():
        values = _values(settings, found, names)
    form.show(
        {name: {"value": value, "from": str(origin)} for name, (value, origin) in values.items()},
        lambda: _table(values),
    )


_OPTIONS_ARE = "OPTIONS are those of `tandem serve coordinator --help`.\n"


def _output(words: Sequence[str]) -> tuple[OutputOptions, list[str]]:
    """Take the form of output from the words; the others are returned."""
    form, others = OutputForm.TABLE, []
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if word == "--json":
            form = OutputForm.JSON
        elif option in ("-o", "--output"):
            form = _form(value if equals else next(rest, ""))
        else:
            others.append(word)
    return OutputOptions(form), others


def _form(name: str) -> OutputForm:
    try:
        return OutputForm(name)
    except ValueError:
        known = ", ".join(form.value for form in OutputForm)
        raise ConfigurationError(f"--output is {name!r}; it must be one of {known}") from None


def _names(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The option names at the beginning, and the arguments from the first option on."""
    count = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
    return [word.replace("-", "_") for word in words[:count]], [*words[count:]]


@command(
    config,
    "tandem config check tandem.toml --section-name speculation",
    """tandem config check '{"method": "ngram", "num_speculative_tokens": 4}'""",
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
    raise typer.Exit(Exit.USAGE)


def _values(
    settings: ConfigSettings, found: Mapping[str, Origin], names: Sequence[str]
) -> dict[str, tuple[Any, Origin]]:
    values = settings.model_dump(mode="json")
    unknown = [name for name in names if name not in values]
    if unknown:
        raise ConfigurationError(f"there is no option {', '.join(unknown)}")
    return {name: (values[name], found.get(name, Origin.DEFAULT)) for name in names or values}


def _table(values: Mapping[str, tuple[Any, Origin]]) -> Table:
    table = plain_table("OPTION", "VALUE", "FROM")
    for name, (value, origin) in values.items():
        table.add_row(name, "" if value is None else spelled(value), origin)
    return table


def add_to(app: typer.Typer) -> None:
    """Add the group to the program."""
    app.add_typer(config, name="config")
