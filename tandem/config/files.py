"""Config files: TOML, YAML or JSON, the whole file or one section of it, as MAX's `config_file` and `section_name`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

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
