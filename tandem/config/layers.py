"""Sources of options, the strongest first: command line, environment, config file, defaults."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from argparse import SUPPRESS, ArgumentError, ArgumentParser, BooleanOptionalAction, HelpFormatter
from collections.abc import Container, Mapping, Sequence
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from tandem.config import options
from tandem.config.names import REFUSED_OPTIONS
from tandem.config.options import Options
from tandem.config.rule import spelled
from tandem.config.speculative import SpeculativeConfig
from tandem.errors import ConfigurationError


class Origin(StrEnum):
    """Origins of a value, the strongest first."""

    LIVE = "live"
    """An administrator set it while the process ran."""
    COMMAND_LINE = "command line"
    ENVIRONMENT = "environment"
    FILE = "file"
    INFERRED = "inferred"
    DEFAULT = "default"


GROUPS = {
    "ModelServerSettings": "Model",
    "ModelOptions": "Model",
    "CoordinatorSettings": "Coordinator",
    "SharingOptions": "Coordinator",
    "DraftSettings": "Drafting",
    "TargetSettings": "Drafting",
    "DraftingOptions": "Drafting",
    "SpeculativeConfig": "Speculative decoding",
    "AcceptanceOptions": "Acceptance",
    "SamplingOptions": "Sampling defaults",
    "RequestBounds": "Bounds of a request",
    "ServiceAccessOptions": "Access to the services",
    "HttpOptions": "HTTP",
    "AdminOptions": "Administration",
    "ServerSettings": "Server",
    "ProtectionOptions": "TLS and tokens",
    "TelemetryOptions": "Metrics and traces",
    "SourceOptions": "Config file",
    "VllmSettings": "Drafting",
}
"""Heading of the options that a class brings, in the order of the help."""

# TANDEM_ sets an option of speculative decoding for every service, TANDEM_COORDINATOR_ and the like any option of one.
# TANDEM_CLIENT_ is for clients, TANDEM_VLLM_ for the plug-in of vLLM.
_SERVICE_PREFIXES = tuple(
    f"{options.ENVIRONMENT_PREFIX}{service}_"
    for service in ("CLIENT", "COORDINATOR", "DRAFT", "TARGET", "VLLM")
)


def read_options(
    cls: type[Options], arguments: Sequence[str], environment: Mapping[str, str], program: str
) -> tuple[dict[str, Any], dict[str, Origin]]:
    """The strongest value of each option of a settings class that any source sets, and where it comes from.

    An inferred value has the origin of the value that it was inferred from. So it overrides nothing except a name that
    turned out to be a method.
    """
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}

    def add(origin: Origin, found: Mapping[str, Any]) -> None:
        for name, value in found.items():
            # Options of speculative decoding that belong to another service: all may share a file or environment.
            is_anothers = name not in cls.model_fields and name in SpeculativeConfig.model_fields
            if name not in values and not is_anothers:
                values[name], origins[name] = value, origin

    add(Origin.COMMAND_LINE, _from_command_line(cls, arguments, program))
    add(Origin.ENVIRONMENT, _from_environment(cls, environment))
    if path := values.get("config_file"):
        section = options.read_section(Path(path), values.get("section_name"))
        add(Origin.FILE, options.spelled_one_way(section, cls.model_fields, is_shared=True))
    for name, value in options.inferred(values, cls.model_fields).items():
        values[name] = value
        origins.setdefault(name, Origin.INFERRED)
    return values, origins


def _from_command_line(cls: type[Options], arguments: Sequence[str], program: str) -> dict[str, Any]:
    parser = command_line(cls, program)
    try:
        given, rest = parser.parse_known_args(arguments)
    except ArgumentError as error:
        raise ConfigurationError(str(error).removeprefix("argument ")) from None
    # What follows an unknown option may be its value.
    if unknown := [word.partition("=")[0] for word in rest if word.startswith("-")] or rest[:1]:
        known = {name: _flag(name) for name in (*cls.model_fields, *_aliases(cls).values(), "help")}
        raise ConfigurationError("; ".join(options.unknown_option(word, known) for word in unknown))
    return options.spelled_one_way(vars(given), cls.model_fields)


@cache
def command_line(cls: type[Options], program: str, width: int | None = None) -> ArgumentParser:
    """The command line of a settings class, with its help."""
    parser = ArgumentParser(
        prog=program,
        usage="%(prog)s [OPTIONS]",
        description=cls.__doc__,
        formatter_class=lambda prog: _Help(
            prog, max_help_position=34, width=width or min(shutil.get_terminal_size().columns, 100)
        ),
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=SUPPRESS,
    )
    groups = {title: parser.add_argument_group(title) for title in GROUPS.values()}
    # An option belongs to the class that first brought it.
    owners = {name: base.__name__ for base in cls.__mro__ for name in inspect.get_annotations(base)}
    aliases = _aliases(cls)
    for name, field in cls.model_fields.items():
        flags = [_flag(each) for each in (name, aliases.get(name)) if each]
        notes = [f"env var: {cls.variable(name)}"]
        if field.is_required():
            notes.append("required")
        elif field.default is not None:
            notes.append(f"default: {spelled(field.default)}")
        text = f"{' '.join((field.description or '').split())} [{'; '.join(notes)}]".replace("%", "%%")
        group, kind = groups[GROUPS[owners[name]]], _kind(field.annotation)
        if kind == "bool":
            group.add_argument(*flags, dest=name, help=text, action=BooleanOptionalAction)
        else:
            action = "append" if name in getattr(cls, "repeatable", ()) else "store"
            group.add_argument(*flags, dest=name, help=text, metavar=f"<{kind}>", action=action)
    return parser


class _Help(HelpFormatter):
    """Breaks no option's name in two."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        super().add_usage(usage, actions, groups, "Usage: ")

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _aliases(cls: type[Options]) -> dict[str, str]:
    """vLLM's spelling of an option, where the class has no option of that name."""
    return {
        name: alias
        for alias, name in options.ALIASES.items()
        if name in cls.model_fields and alias not in cls.model_fields
    }


def _kind(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin in (Annotated, Union, UnionType):
        return _kind(arguments[0])
    if origin is tuple:
        return f"list of {_kind(arguments[0])}"
    return {Path: "path", int: "int", float: "float", bool: "bool"}.get(annotation, "str")


def _from_environment(cls: type[Options], environment: Mapping[str, str]) -> dict[str, Any]:
    """An empty variable counts as not set, since compose files pass unset variables like this."""
    own_prefix = cls.env_prefix or options.ENVIRONMENT_PREFIX
    shared: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for variable, value in environment.items():
        if not variable.startswith(options.ENVIRONMENT_PREFIX) or not value:
            continue
        name = variable.removeprefix(own_prefix).lower()
        if variable.startswith(own_prefix) and _is_known(name, cls.model_fields):
            own[name] = value
        elif _is_known(
            name := variable.removeprefix(options.ENVIRONMENT_PREFIX).lower(), SpeculativeConfig.model_fields
        ):
            shared[name] = value
        elif variable.startswith(own_prefix) or not variable.startswith(_SERVICE_PREFIXES):
            shared[variable] = value  # no option: refused by the name it was given
    names = cls.model_fields
    return options.spelled_one_way(shared, names, is_shared=True) | options.spelled_one_way(own, names)


def _is_known(name: str, fields: Container[str]) -> bool:
    return name in fields or name in REFUSED_OPTIONS or options.ALIASES.get(name, name) in fields
