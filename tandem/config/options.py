"""Base of option classes: one spelling for each option, unknown ones refused, everything wrong reported at once."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    SecretStr,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from tandem.config import names
from tandem.config.rule import Rules, broken, spell
from tandem.errors import ConfigurationError

ENVIRONMENT_PREFIX = "TANDEM_"
"""Begins the name of every variable that sets an option."""

ALIASES = {
    "method": "speculative_method",
    "model": "draft_model_path",
    "rejection_sample_method": "rejection_sampling_strategy",
    "max_model_len": "max_length",
    "tensor_parallel_size": "draft_tensor_parallel_size",
    "gpu_memory_utilization": "device_memory_utilization",
    "num_speculative_tokens_per_batch_size": "speculation_policy",
}
"""vLLM's spelling of an option, and the one used here, which is MAX's."""

SHORT_HELP = "short help"
"""In the annotation of an option that most people need: `--help` lists it, `--help-all` the others too."""

_JSON_OPTION = "speculative_config"
"""vLLM's option for all options at once, as a JSON object."""

OptionsT = TypeVar("OptionsT", bound="Options")


class Options(BaseModel):
    """Options that keep rules. Every error of its validation is one sentence for a user."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    env_prefix: ClassVar[str] = ""
    """Begins the variables of a process's own options; empty where a class is not the settings of a process."""
    is_shared: ClassVar[bool] = False
    """True for options that have the same variable for every process."""
    reads_files: ClassVar[bool] = True
    """False for a process's settings: `tandem.config.sources` has read the config file before they are made."""

    own_rules: ClassVar[Rules] = ()
    """Rules that this class adds to those of its base classes."""

    @classmethod
    def rules(cls) -> Rules:
        return tuple(rule for base in reversed(cls.__mro__) for rule in vars(base).get("own_rules", ()))

    @classmethod
    def variable(cls, name: str) -> str:
        is_shared = any(
            vars(base).get("is_shared") and name in base.model_fields
            for base in cls.__mro__
            if issubclass(base, Options)
        )
        return (ENVIRONMENT_PREFIX if is_shared else cls.env_prefix or ENVIRONMENT_PREFIX) + name.upper()

    @classmethod
    def label(cls, place: Sequence[int | str], value: object) -> str:
        """The name of an option with a wrong value, or of a part of it, in sentences."""
        return ".".join(map(str, place))

    @model_validator(mode="wrap")
    @classmethod
    def _tell_all_at_once(
        cls: type[OptionsT], values: Any, handler: ModelWrapValidatorHandler[OptionsT]
    ) -> OptionsT:
        if not isinstance(values, dict):
            return handler(values)
        try:
            values = spelled_one_way(values, cls.model_fields)
            if cls.reads_files and (path := values.get("config_file")):
                section = read_section(Path(path), values.get("section_name"))
                values = spelled_one_way(section, cls.model_fields, is_shared=True) | values
            values |= infer_options(values, cls.model_fields)
            options = handler(values)
            if not (found := broken(cls.rules(), options)):
                return options
        except ConfigurationError as error:
            found = [str(error)]
        except ValidationError as error:
            details = error.errors()
            if any(detail["type"] == _SENTENCE for detail in details):
                raise  # said already: settings are validated inside of their own __init__
            found = [_describe(cls, detail) for detail in details]
            found += _broken_by_rest(cls, values, {str(detail["loc"][0]) for detail in details})
        # A sentence is an argument, not the template: it may hold braces.
        errors = [PydanticCustomError(_SENTENCE, "{text}", {"text": text}) for text in dict.fromkeys(found)]
        raise ValidationError.from_exception_data(
            cls.__name__, [InitErrorDetails(type=error, loc=(), input=None) for error in errors]
        )


def _broken_by_rest(cls: type[Options], values: Mapping[str, Any], wrong: Container[str]) -> list[str]:
    """How the values that can be read break rules. A rule that needs another one finds no such attribute, and says
    nothing."""
    read = {
        name: TypeAdapter(field.rebuild_annotation()).validate_python(values[name])
        for name, field in cls.model_fields.items()
        if name in values and name not in wrong
    }
    options = cls.model_construct(**read)
    for name in cls.model_fields:
        if name in wrong:
            vars(options).pop(name, None)
    found: list[str] = []
    for rule in cls.rules():
        with suppress(AttributeError):
            found += rule.broken_by(options)
    return found


def sentences(error: ValidationError) -> list[str]:
    """One sentence for each error of a validation."""
    return [detail["msg"] for detail in error.errors()]


_SENTENCE: Final = "sentence"
"""Type of an error whose message is for a user as it is."""

_WORDS = {
    "int": "an integer",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "a text",
    "tuple": "a list of numbers",
    "dict": "an object",
    "path": "a path",
}
"""The form that a value must have where pydantic cannot read it, by the first word of its error's type."""


def _describe(cls: type[Options], detail: ErrorDetails) -> str:
    kind = detail["type"]
    value = detail["input"]
    name = cls.label(detail["loc"], value)
    if kind == "extra_forbidden":
        return unknown_option(name, _names_like(cls, name), value, cls.env_prefix)
    if kind == "missing":
        return f"{flag(name)} is missing; give it, or set {cls.variable(name)}"
    field = cls.model_fields[str(detail["loc"][0])]
    if SecretStr in (field.annotation, *get_args(field.annotation)):
        return f"{name} is no text but a {type(value).__name__}; it must be a text"
    word = _WORDS.get(kind.partition("_")[0])
    if word is not None and kind.endswith(("_parsing", "_type", "_from_float", "_number")):
        return f"{name} is {value!r}; it must be {word}"
    if kind == "value_error":
        return f"{name} is {value!r}; {detail['ctx']['error']}"
    must = detail["ctx"]["expected"] if kind in ("literal_error", "enum") else allowed_range(field)
    reason = f"; it must be {must}" if must else f": {detail['msg'][0].lower()}{detail['msg'][1:]}"
    return f"{name} is {spell(value)}{reason}"


def _names_like(cls: type[Options], given: str) -> dict[str, str]:
    """The options in the form of an unknown one: a flag, a variable or a name."""
    if given.startswith("-"):
        return {
            name: flag(name) for name in (*cls.model_fields, *aliases_of(cls.model_fields).values(), "help")
        }
    if given.startswith(ENVIRONMENT_PREFIX):
        return {name: cls.variable(name) for name in cls.model_fields}
    return {name: name for name in cls.model_fields}


def flag(name: str) -> str:
    """An option on a command line."""
    return "--" + name.replace("_", "-")


def aliases_of(fields: Container[str]) -> dict[str, str]:
    """vLLM's spelling of an option, where there is no option of that name."""
    return {name: alias for alias, name in ALIASES.items() if name in fields and alias not in fields}


def allowed_range(field: FieldInfo) -> str:
    """The range of an option's numbers in words; empty for any."""
    bounds = {
        kind: getattr(entry, kind)
        for entry in field.metadata
        for kind in ("ge", "gt", "le")
        if hasattr(entry, kind)
    }
    if {"ge", "le"} <= bounds.keys():
        return f"between {bounds['ge']:g} and {bounds['le']:g}"
    words = {"ge": "at least", "gt": "above", "le": "at most"}
    return " and ".join(f"{words[kind]} {bound:g}" for kind, bound in bounds.items())


_LIKENESS = 0.65
"""An unknown option that is this like a known one may mean it. Of three letters with two swapped it is 0.67."""


def unknown_option(
    given: str, known: Mapping[str, str], value: object = None, own_prefix: str = ENVIRONMENT_PREFIX
) -> str:
    """The sentence for an unknown option, as it was given: `name`, `--name` or `TANDEM_NAME`."""
    name = given.removeprefix("--").removeprefix(own_prefix).removeprefix(ENVIRONMENT_PREFIX)
    name = name.replace("-", "_").lower()
    if reason := names.REFUSED_OPTIONS.get(name):
        return f"{given} is not available in this version: {reason}"
    if words := names.OF_A_SERVICE.get(name) or names.named_elsewhere(name):
        return f"{given} is not an option: {words}"
    if isinstance(value, dict):
        return f"{given} is not an option; if it is a section of the file, name it with section_name"
    similar = get_close_matches(name, known, n=1, cutoff=_LIKENESS)
    return f"{given} is not an option" + (f"; did you mean {known[similar[0]]}?" if similar else "")


def spelled_one_way(
    values: Mapping[str, Any], fields: Container[str], *, is_shared: bool = False
) -> dict[str, Any]:
    """The values by Tandem's names, with those inside the JSON form as separate options.

    A null value counts as not given, as in vLLM. A separate option is stronger than the JSON form. In a source that
    other processes read too (`is_shared`) an alias stays an alias, even where a class has its own option of that name:
    a service's `--model` is the one it serves, `TANDEM_MODEL` is the draft's.
    """
    own = dict(values)
    inside = own.pop(_JSON_OPTION, None)
    if isinstance(inside, str):
        with suppress(ValueError):
            inside = json.loads(inside)
    if not isinstance(inside, dict | None):
        raise ConfigurationError(f"{_JSON_OPTION} is {values[_JSON_OPTION]!r}; it must be a JSON object")
    # Inside the JSON form the length is the draft's; a flag or a field of that name is a server's.
    aliases = {**ALIASES, "max_model_len": "draft_max_length"}
    found = _rename(inside or {}, fields, aliases, is_shared=True)
    return found | _rename(own, fields, ALIASES, is_shared=is_shared)


def _rename(
    values: Mapping[str, Any], fields: Container[str], aliases: Mapping[str, str], *, is_shared: bool
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    method = next((values[name] for name in ("speculative_method", "method") if name in values), None)
    for given, value in values.items():
        name = given if given in fields and not is_shared else aliases.get(given, given)
        if value is None and (name in fields or name in names.REFUSED_OPTIONS):
            continue
        if name not in fields and names.changes_nothing(name, value, method):
            continue
        if name in found and found[name] != value:
            spellings = " and ".join([name, *(alias for alias, meant in aliases.items() if meant == name)])
            raise ConfigurationError(
                f"{name} is {found[name]} and {value}: {spellings} are one option; give it once"
            )
        found[name] = value
    return found


def infer_options(values: Mapping[str, Any], fields: Container[str]) -> dict[str, Any]:
    """Infer unset options from the others, as vLLM does.

    The method from the draft model alone; one end of the prompt lookup's range from the other.
    """
    found: dict[str, Any] = {}
    model = values.get("draft_model_path")
    method = values.get("speculative_method")
    if "draft_model_path" in fields and isinstance(model, str | Path):
        method = method or names.inferred_method(str(model))
        found["speculative_method"] = method
        if str(model) == method and method in names.MODEL_FREE_METHODS:
            found["draft_model_path"] = None  # `model` named the method, as vLLM lets it
    if "num_speculative_tokens" in fields and values.get("num_speculative_tokens") is None:
        # vLLM's default: the depth of suffix trees, a head's own `n_predict`, else none.
        if method == names.SUFFIX:
            depth = values.get("suffix_decoding_max_tree_depth")
            found["num_speculative_tokens"] = depth or names.SUFFIX_TREE_DEPTH
        elif model and isinstance(own := names.read_config(Path(model)).get("n_predict"), int) and own > 0:
            found["num_speculative_tokens"] = own
    if "prompt_lookup_min" in fields:
        smallest = values.get("prompt_lookup_min")
        largest = values.get("prompt_lookup_max")
        if smallest is None and largest is not None:
            found["prompt_lookup_min"] = largest
        if largest is None and smallest is not None:
            found["prompt_lookup_max"] = smallest
    return found


_READERS: dict[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
    ".json": json.loads,
}


def read_section(path: Path, section: str | None = None) -> dict[str, Any]:
    """The options in a TOML, YAML or JSON file, or in one of its sections."""
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
    must = f"config_file is {path}; it must hold options, one a line"
    if section is not None:
        sections = content if isinstance(content, dict) else {}
        if section not in sections:
            there = ", ".join(name for name, value in sections.items() if isinstance(value, dict)) or "none"
            raise ConfigurationError(f"section_name is {section}; the sections of {path} are: {there}")
        content = sections[section]
        must = f"section_name is {section}; it must be a section of {path} that holds options"
    if not isinstance(content, dict | None):
        raise ConfigurationError(must)
    return {str(name): value for name, value in (content or {}).items()}
