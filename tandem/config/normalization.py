"""Normalizes options to one spelling: aliases, vLLM's JSON form, and values from a config file."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from tandem.config.files import read_section
from tandem.config.methods import MODEL_FREE_METHODS, inferred_method
from tandem.config.refusals import REFUSED_OPTIONS
from tandem.errors import ConfigurationError

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
