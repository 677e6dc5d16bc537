"""Base of option classes: one spelling for each option, unknown ones refused, all errors at once."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    SecretStr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError
from pydantic_settings import BaseSettings

from tandem.config.names import MODEL_FREE_METHODS, REFUSED_OPTIONS, inferred_method
from tandem.config.rule import Rule, broken, spelled
from tandem.errors import ConfigurationError

_READERS: dict[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
    ".json": json.loads,
}


def read_section(path: Path, section: str | None = None) -> dict[str, Any]:
    """The options in a file, or in one of its sections.

    Raises:
        ConfigurationError: the file cannot be read, or has no such section.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigurationError(f"config_file is {path}; its name must end in {', '.join(_READERS)}")
    try:
        content = reader(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"config_file is {path}; it cannot be read: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(
            f"config_file is {path}; it is not valid {path.suffix[1:]}: {reason}"
        ) from None
    if section is None:
        return _mapping(content, f"config_file is {path}; it must hold options, one a line")
    sections = content if isinstance(content, dict) else {}
    if section not in sections:
        there = ", ".join(name for name, value in sections.items() if isinstance(value, dict)) or "none"
        raise ConfigurationError(f"section_name is {section}; the sections of {path} are: {there}")
    return _mapping(
        sections[section], f"section_name is {section}; it must be a section of {path} that holds options"
    )


def _mapping(content: object, otherwise: str) -> dict[str, Any]:
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(otherwise)
    return {str(name): value for name, value in content.items()}


ALIASES = {
    "method": "speculative_method",
    "model": "draft_model_path",
    "rejection_sample_method": "rejection_sampling_strategy",
    "max_model_len": "max_length",
}
"""vLLM's spelling of an option, and the one used here, which is MAX's."""

JSON_OPTION = "speculative_config"
"""vLLM's option for all options at once, as a JSON object."""


def normalized(
    values: Mapping[str, Any], fields: Container[str], *, with_file: bool = True
) -> dict[str, Any]:
    """The values under one spelling, over those of a config file, with inferred values added.

    Args:
        values: Values from one source, or merged from several.
        fields: Names of the options of the class.
        with_file: Whether to read `config_file`. False where it has been read, as for the settings of a process.

    Raises:
        ConfigurationError: two spellings disagree, or a file or JSON text cannot be read.
    """
    values = spelled_one_way(values, fields)
    path = values.get("config_file")
    if with_file and path:
        section = read_section(Path(path), values.get("section_name"))
        values = spelled_one_way(section, fields, is_shared=True) | values
    return values | inferred(values, fields)


def spelled_one_way(
    values: Mapping[str, Any], fields: Container[str], *, is_shared: bool = False
) -> dict[str, Any]:
    """The values by Tandem's names, with those inside the JSON form as separate options.

    A null value counts as not given, as in vLLM. A separate option is stronger than the JSON form.

    Args:
        values: Values from one source. fields: Names of the options of the class. is_shared: Whether other services
        read the same source. There an alias stays an alias, even where a class has its own option of that name: a
        service's `--model` is the one it serves, `TANDEM_MODEL` is the draft's.

    Raises:
        ConfigurationError: an option has two values under two names, or the JSON form is not a JSON object.
    """
    inside = _json_object(values.get(JSON_OPTION))
    own = {name: value for name, value in values.items() if name != JSON_OPTION}
    return _renamed(inside, fields, is_shared=True) | _renamed(own, fields, is_shared=is_shared)


def inferred(values: Mapping[str, Any], fields: Container[str]) -> dict[str, Any]:
    """Infer unset options from the others, as vLLM does.

    The method from the draft model alone; one end of the prompt lookup's range from the other.
    """
    found: dict[str, Any] = {}
    model, method = values.get("draft_model_path"), values.get("speculative_method")
    if "draft_model_path" in fields and isinstance(model, str | Path):
        method = method or inferred_method(str(model))
        found["speculative_method"] = method
        if str(model) == method and method in MODEL_FREE_METHODS:
            found["draft_model_path"] = None  # `model` named the method, as vLLM lets it
    if "prompt_lookup_min" in fields:
        smallest, largest = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
        if smallest is None and largest is not None:
            found["prompt_lookup_min"] = largest
        if largest is None and smallest is not None:
            found["prompt_lookup_max"] = smallest
    return found


def _renamed(values: Mapping[str, Any], fields: Container[str], *, is_shared: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for given, value in values.items():
        name = given if given in fields and not is_shared else ALIASES.get(given, given)
        if value is None and (name in fields or name in REFUSED_OPTIONS):
            continue
        if name in found and found[name] != value:
            raise ConfigurationError(
                f"{name} is {found[name]} and {value}: {_spellings(name)} are one option; give it once"
            )
        found[name] = value
    return found


def _spellings(name: str) -> str:
    return " and ".join([name, *(alias for alias, meant in ALIASES.items() if meant == name)])


def _json_object(text: object) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{JSON_OPTION} is {text!r}; it must be a JSON object")
    return value


ENVIRONMENT_PREFIX = "TANDEM_"
"""Begins the name of every variable that sets an option."""

SENTENCE = "sentence"
"""Type of a validation error whose message is a whole sentence for a user."""

_WORDS = {
    "int_parsing": "an integer",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "a text",
    "tuple_type": "a list of numbers",
    "path_type": "a path",
}
_FIRST_CHOICE = "expected"

OptionsT = TypeVar("OptionsT", bound="Options")


@dataclass(frozen=True, slots=True)
class _SecondLook:
    """Some values could not be read; what do the rules say of the others?"""

    unreadable: Collection[str]


class Options(BaseModel):
    """Options that keep rules. Pydantic reads the values; the rules, their ranges included, are in `rules`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @classmethod
    def rules(cls) -> tuple[Rule[Any], ...]:
        """Rules for these options alone. A class adds its own to those of its base classes."""
        return ()

    @model_validator(mode="wrap")
    @classmethod
    def _tell_all_at_once(
        cls: type[OptionsT], values: Any, handler: ModelWrapValidatorHandler[OptionsT], info: ValidationInfo
    ) -> OptionsT:
        if not isinstance(values, dict):
            return handler(values)
        second_look = info.context if isinstance(info.context, _SecondLook) else None
        try:
            if second_look is None:
                # The settings of a process are read by `tandem.config.layers`, files included.
                values = normalized(values, cls.model_fields, with_file=BaseSettings not in cls.__mro__)
            options = handler(values)
        except ConfigurationError as error:
            raise _refused(cls, [_sentence(str(error))]) from None
        except ValidationError as error:
            others = [] if second_look else cls._others(values, error)
            raise _refused(cls, [*_described(cls, error), *others]) from None
        if sentences := broken(cls.rules(), options, second_look.unreadable if second_look else ()):
            raise _refused(cls, map(_sentence, sentences))
        return options

    @classmethod
    def _others(cls, values: dict[str, Any], error: ValidationError) -> list[InitErrorDetails]:
        """The rules that are broken by those values that could be read."""
        unreadable = {str(detail["loc"][0]) for detail in error.errors() if detail["loc"]}
        sentences: dict[str, None] = {}
        for plain in _plain_bases(cls):
            readable = {
                name: value
                for name, value in values.items()
                if name in plain.model_fields and name not in unreadable
            }
            try:
                plain.model_validate(readable, context=_SecondLook(unreadable))
            except ValidationError as broken_rules:
                sentences |= dict.fromkeys(detail["msg"] for detail in broken_rules.errors())
        return [_sentence(text) for text in sentences]


def _plain_bases(cls: type[Options]) -> list[type[Options]]:
    """The classes of options that a class inherits: unlike the class itself, they can be checked with required options
    missing."""
    return [base for base in cls.__mro__ if issubclass(base, Options) and BaseSettings not in base.__mro__]


def _refused(cls: type[Options], details: Iterable[InitErrorDetails]) -> ValidationError:
    return ValidationError.from_exception_data(cls.__name__, list(details))


def _sentence(text: str, location: tuple[str | int, ...] = ()) -> InitErrorDetails:
    # The text is an argument, not the template: it may hold braces.
    error = PydanticCustomError(SENTENCE, "{text}", {"text": text})
    return InitErrorDetails(type=error, loc=location, input=None)


def _described(cls: type[Options], error: ValidationError) -> list[InitErrorDetails]:
    """Pydantic's errors as sentences, without those that only a class of settings can phrase."""
    return [
        _sentence(text, detail["loc"]) if (text := _describe(cls, detail)) else _kept(detail)
        for detail in error.errors()
    ]


def _kept(detail: ErrorDetails) -> InitErrorDetails:
    return InitErrorDetails(
        type=detail["type"], loc=detail["loc"], input=detail["input"], ctx=detail.get("ctx", {})
    )


def _describe(cls: type[Options], detail: ErrorDetails) -> str | None:
    name, kind = ".".join(map(str, detail["loc"])), detail["type"]
    if kind == SENTENCE:
        return detail["msg"]
    if kind == "extra_forbidden":
        return _unknown_option(cls, name, detail["input"])
    if kind in _WORDS:
        return f"{name} is {_shown(cls, name, detail['input'])}; it must be {_WORDS[kind]}"
    if kind == "literal_error":
        return f"{name} is {spelled(detail['input'])}; it must be {detail['ctx'][_FIRST_CHOICE]}"
    return None


def _shown(cls: type[Options], name: str, value: object) -> str:
    field = cls.model_fields.get(name)
    is_secret = field is not None and SecretStr in (field.annotation, *get_args(field.annotation))
    return f"no text but a {type(value).__name__}" if is_secret else repr(value)


def unknown_option(
    given: str, known: Mapping[str, str], value: object = None, own_prefix: str = ENVIRONMENT_PREFIX
) -> str:
    """The sentence for an unknown option, as it was given: `name`, `--name` or `TANDEM_NAME`.

    Args:
        given: The user's spelling.
        known: Known options by name, with their spelling in that source, to suggest a similar one.
        value: Its value, if known.
        own_prefix: Prefix of the service's environment variables.
    """
    name = given.removeprefix("--").removeprefix(own_prefix).removeprefix(ENVIRONMENT_PREFIX)
    name = name.replace("-", "_").lower()
    if reason := REFUSED_OPTIONS.get(name):
        return f"{given} is not available in this version: {reason}"
    if isinstance(value, dict):
        return f"{given} is not an option; if it is a section of the file, name it with section_name"
    similar = get_close_matches(name, known, n=1, cutoff=0.8)
    return f"{given} is not an option" + (f"; did you mean {known[similar[0]]}?" if similar else "")


def _unknown_option(cls: type[Options], given: str, value: object) -> str:
    """Read the options of a class from the environment. Options that are not shared belong to one service."""
    own_prefix = str(cls.model_config.get("env_prefix", ""))
    shared = {name for base in _plain_bases(cls) for name in base.model_fields}
    in_environment = {
        name: (ENVIRONMENT_PREFIX if name in shared else own_prefix) + name.upper()
        for name in cls.model_fields
    }
    is_variable = given.startswith(ENVIRONMENT_PREFIX)
    known = in_environment if is_variable else {name: name for name in cls.model_fields}
    return unknown_option(given, known, value, own_prefix)
