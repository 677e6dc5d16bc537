"""Sources of options, the strongest first: command line, environment, config file, defaults.

They stay apart until the end, so that the origin of each value is known.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

from tandem.config.help import help_text
from tandem.config.names import REFUSED_OPTIONS
from tandem.config.options import (
    ALIASES,
    ENVIRONMENT_PREFIX,
    inferred,
    read_section,
    spelled_one_way,
    unknown_option,
)
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
    """From another option."""
    DEFAULT = "default"


_OTHERS_OPTIONS = SpeculativeConfig.model_fields.keys()
"""Options that a shared source may hold for another service."""

# TANDEM_ sets an option of speculative decoding for every service, TANDEM_COORDINATOR_ and the like any option of one.
# TANDEM_CLIENT_ is for clients, TANDEM_VLLM_ for the plug-in of vLLM.
_SERVICE_PREFIXES = tuple(
    f"{ENVIRONMENT_PREFIX}{service}_" for service in ("CLIENT", "COORDINATOR", "DRAFT", "TARGET", "VLLM")
)


@dataclass(frozen=True, slots=True)
class Layer:
    """Values from one source."""

    origin: Origin
    values: dict[str, Any]


def read_layers(
    cls: type[BaseSettings], arguments: Sequence[str], environment: Mapping[str, str], program: str
) -> list[Layer]:
    """Values that each source gives for the options of a settings class, the strongest source first.

    Raises:
        ConfigurationError: an option of the command line is unknown, or a file or JSON text cannot be read.
        SystemExit: --help was asked for.
    """
    if {"-h", "--help"} & {*arguments}:
        sys.stdout.write(help_text(cls, program))
        raise SystemExit(0)
    layers = [
        Layer(Origin.COMMAND_LINE, _from_command_line(cls, arguments, program)),
        Layer(Origin.ENVIRONMENT, _from_environment(cls, environment)),
    ]
    given = merged(layers)
    if path := given.get("config_file"):
        section = read_section(Path(path), given.get("section_name"))
        layers.append(
            Layer(
                Origin.FILE, _without_others(cls, spelled_one_way(section, cls.model_fields, is_shared=True))
            )
        )
    layers.append(Layer(Origin.INFERRED, inferred(merged(layers), cls.model_fields)))
    return layers


def merged(layers: Sequence[Layer]) -> dict[str, Any]:
    """The strongest value of each option that any source sets.

    An inferred value has the origin of the value that it was inferred from. So it overrides nothing except a name that
    turned out to be a method.
    """
    values: dict[str, Any] = {}
    for layer in reversed(layers):
        values |= layer.values
    inferences = next((layer.values for layer in layers if layer.origin is Origin.INFERRED), {})
    return values | inferences


def origins(layers: Sequence[Layer]) -> dict[str, Origin]:
    """For each option that any place names: which one decided."""
    found: dict[str, Origin] = {}
    for layer in reversed(layers):
        found |= dict.fromkeys(layer.values, layer.origin)
    return found


def _without_others(
    cls: type[BaseSettings], values: Mapping[str, Any], others: Collection[str] = _OTHERS_OPTIONS
) -> dict[str, Any]:
    """Without the options of speculative decoding that are another service's: all may share a file or environment."""
    return {name: value for name, value in values.items() if name in cls.model_fields or name not in others}


def _from_command_line(cls: type[BaseSettings], arguments: Sequence[str], program: str) -> dict[str, Any]:
    aliases = {
        name.replace("_", "-"): alias.replace("_", "-")
        for alias, name in ALIASES.items()
        if name in cls.model_fields and alias not in cls.model_fields
    }
    _refuse_unknown(arguments, {name.replace("_", "-") for name in cls.model_fields} | set(aliases.values()))
    arguments = _joined(arguments, getattr(cls, "repeatable", ()))
    try:
        source: CliSettingsSource[BaseSettings] = CliSettingsSource(
            cls, cli_parse_args=arguments, cli_prog_name=program, cli_shortcuts=aliases
        )
    except SettingsError as error:
        raise ConfigurationError(str(error).removeprefix("error parsing CLI: argument ")) from None
    return _without_others(cls, spelled_one_way(source(), cls.model_fields), SpeculativeConfig.model_fields)


def _joined(arguments: Sequence[str], repeatable: Collection[str]) -> list[str]:
    """Join repeated address options with commas. Of any other repeated option the last one counts."""
    options = {f"--{name.replace('_', '-')}" for name in repeatable}
    values: dict[str, list[str]] = {}
    others: list[str] = []
    words = iter(arguments)
    for word in words:
        option, is_one, value = word.partition("=")
        if option not in options:
            others.append(word)
        elif value := value if is_one else next(words, ""):
            values.setdefault(option, []).append(value)
        else:
            others.append(word)
    return [*others, *(f"{option}={','.join(given)}" for option, given in values.items())]


def _refuse_unknown(arguments: Sequence[str], known: Collection[str]) -> None:
    """All unknown options at once, and why: argparse would name them without a reason."""
    given = [word.partition("=")[0] for word in arguments if word.startswith("--") and word != "--"]
    options = {name.replace("-", "_"): f"--{name}" for name in (*known, "help")}
    spelled = options.values()
    unknown = [
        word for word in given if word not in spelled and word.replace("--no-", "--", 1) not in spelled
    ]
    if unknown:
        raise ConfigurationError("; ".join(unknown_option(word, options) for word in unknown))


def _from_environment(cls: type[BaseSettings], environment: Mapping[str, str]) -> dict[str, Any]:
    """An empty variable counts as not set, since compose files pass unset variables like this."""
    own_prefix = cls.model_config.get("env_prefix") or ENVIRONMENT_PREFIX
    shared: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for variable, value in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or not value:
            continue
        name = variable.removeprefix(own_prefix).lower()
        if variable.startswith(own_prefix) and _is_known(name, cls.model_fields):
            own[name] = value
        elif _is_known(
            name := variable.removeprefix(ENVIRONMENT_PREFIX).lower(), SpeculativeConfig.model_fields
        ):
            shared[name] = value
        elif variable.startswith(own_prefix) or not variable.startswith(_SERVICE_PREFIXES):
            shared[variable] = value  # no option: refused by the name it was given
    names = cls.model_fields
    return _without_others(cls, spelled_one_way(shared, names, is_shared=True)) | _without_others(
        cls, spelled_one_way(own, names), SpeculativeConfig.model_fields
    )


def _is_known(name: str, fields: Container[str]) -> bool:
    return name in fields or name in REFUSED_OPTIONS or ALIASES.get(name, name) in fields
