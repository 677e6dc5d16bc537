"""Sources of options for pydantic-settings, the strongest first: command line, environment, config file, inference.

Each is a source of that library, with what Tandem adds to it: the names of MAX and vLLM, the JSON form, the section of
a file, and each unknown option under the name by which it was given, so that validation refuses it beside all others.
"""

from __future__ import annotations

from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from tandem.config import options
from tandem.config.help import OptionParser
from tandem.config.names import REFUSED_OPTIONS
from tandem.config.origin import Origin
from tandem.config.speculative import SpeculativeConfig
from tandem.errors import ConfigurationError

# TANDEM_ sets an option of speculative decoding for every service, TANDEM_COORDINATOR_ and the like any option of one.
# TANDEM_CLIENT_ is for clients, TANDEM_VLLM_ for the plug-in of vLLM, the rest for measurements and what they start.
_PROCESSES = (
    "CLIENT",
    "COORDINATOR",
    "DRAFT",
    "TARGET",
    "VLLM",
    "BENCH",
    "DELAY",
    "LOAD",
    "PACE",
    "SCRIPTED",
    "STUDY",
)
_PROCESS_PREFIXES = tuple(f"{options.ENVIRONMENT_PREFIX}{process}_" for process in _PROCESSES)

_CLEARING_WORDS = (None, "null", "none")
"""On a command line these take back what the environment or a file sets, where an option may be without a value."""


class OwnSources(options.Options, BaseSettings):
    """Settings that say themselves where they are read from, instead of by pydantic's usual sources."""

    model_config = SettingsConfigDict()

    @classmethod
    def sources(cls, given: InitSettingsSource) -> tuple[PydanticBaseSettingsSource, ...]:
        """The sources, the strongest first; by default the constructor's arguments alone."""
        return (given,)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *others: PydanticBaseSettingsSource,
        **named: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """pydantic's hook."""
        assert isinstance(init_settings, InitSettingsSource)
        return cls.sources(init_settings)


class CommandLine(CliSettingsSource[ArgumentParser]):
    """The words of a command line."""

    origin: ClassVar = Origin.COMMAND_LINE

    def __init__(self, cls: type[Any], arguments: Sequence[str], program: str) -> None:
        self._unknown: dict[str, str] = {}
        super().__init__(
            cls,
            cli_parse_args=list(arguments),
            cli_shortcuts=_shortcuts(cls),
            root_parser=OptionParser(cls, program),
            parse_args_method=self._parse,
            add_argument_method=OptionParser.add_option,
        )

    def __call__(self, **parsed: Any) -> Any:
        fields = self.settings_cls.model_fields
        given: dict[str, Any] = {}
        cleared: dict[str, None] = {}
        for name, value in super().__call__(**parsed).items():
            if value not in _CLEARING_WORDS:
                given[name] = value
            elif fields[name].default is None:
                cleared[name] = None
            else:
                given[name] = value or "null"  # pydantic-settings has read this word as None
        found = options.spelled_one_way(given, fields) | cleared
        return _own(found, fields) | self._unknown

    def _parse(self, parser: ArgumentParser, arguments: Sequence[str]) -> Namespace:
        try:
            given, rest = parser.parse_known_args(arguments)
        except ArgumentError as error:
            raise ConfigurationError(str(error).removeprefix("argument ")) from None
        if self.cli_ignore_unknown_args:
            return given  # the class has a field for them
        # What follows an unknown option may be its value.
        self._unknown = {word.partition("=")[0]: "" for word in rest if word.startswith("-")}
        if rest and not self._unknown:
            raise ConfigurationError(f"{rest[0]} is not an option")
        return given


class Environment(EnvSettingsSource):
    """Variables. An empty one counts as not set, since compose files pass unset variables like this."""

    origin: ClassVar = Origin.ENVIRONMENT

    def __init__(self, cls: type[Any], variables: Mapping[str, str]) -> None:
        super().__init__(cls, env_prefix=cls.env_prefix or options.ENVIRONMENT_PREFIX)
        self.env_vars = {name: value for name, value in variables.items() if value}

    def __call__(self) -> dict[str, Any]:
        fields = self.settings_cls.model_fields
        shared: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for variable, value in self.env_vars.items():
            if not variable.startswith(options.ENVIRONMENT_PREFIX):
                continue
            name = variable.removeprefix(self.env_prefix).lower()
            shared_name = variable.removeprefix(options.ENVIRONMENT_PREFIX).lower()
            is_own = variable.startswith(self.env_prefix)
            if is_own and _is_known(name, fields):
                own[name] = value
            elif _is_known(shared_name, SpeculativeConfig.model_fields):
                shared[shared_name] = value
            elif is_own or not variable.startswith(_PROCESS_PREFIXES):
                shared[variable] = value  # no option: refused by the name it was given
        found = options.spelled_one_way(shared, fields, is_shared=True)
        return _own(found | options.spelled_one_way(own, fields), fields)


class _Whole(PydanticBaseSettingsSource):
    """A source that is read as a whole."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self().get(field_name), field_name, False


class ConfigFile(_Whole):
    """The file that a stronger source names."""

    origin: ClassVar = Origin.FILE

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config_file")
        if not path:
            return {}
        fields = self.settings_cls.model_fields
        section = options.read_section(Path(path), self.current_state.get("section_name"))
        return _own(options.spelled_one_way(section, fields, is_shared=True), fields)


class Inferred(_Whole):
    """The values that follow from other sources. They override nothing except a name that turned out to be a method."""

    origin: ClassVar = Origin.INFERRED

    def __call__(self) -> dict[str, Any]:
        return options.infer_options(self.current_state, self.settings_cls.model_fields)


def _shortcuts(cls: type[Any]) -> dict[str, str]:
    """Other spellings of flags, vLLM's and those of the class, in the form that pydantic-settings takes."""
    aliases = options.aliases_of(cls.model_fields)
    spelled = {name.replace("_", "-"): alias.replace("_", "-") for name, alias in aliases.items()}
    return spelled | (cls.model_config["cli_shortcuts"] or {})


def _own(values: Mapping[str, Any], fields: Container[str]) -> dict[str, Any]:
    """The values without options of speculative decoding that belong to another service: all may share a file or
    environment."""
    return {
        name: value
        for name, value in values.items()
        if name in fields or name not in SpeculativeConfig.model_fields
    }


def _is_known(name: str, fields: Container[str]) -> bool:
    return name in fields or name in REFUSED_OPTIONS or options.ALIASES.get(name, name) in fields
