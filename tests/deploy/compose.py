"""Compose files as `docker compose` understands them: variables filled in, laid over each other, profiles chosen."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.paths import ROOT

COMPOSE_FILE = ROOT / "docker-compose.yml"
GPU = ROOT / "deploy" / "compose.gpu.yml"

_VARIABLE = re.compile(r"\$(?:\$|\{(?P<name>\w+)(?:(?P<how>:?[-?])(?P<otherwise>[^}]*))?\})")


def interpolated(value: Any, variables: Mapping[str, str]) -> Any:
    """The value with `${NAME}`, `${NAME-default}` and `${NAME:-default}` filled in, at any depth."""
    if isinstance(value, dict):
        return {key: interpolated(entry, variables) for key, entry in value.items()}
    if isinstance(value, list):
        return type(value)(interpolated(entry, variables) for entry in value)
    if not isinstance(value, str):
        return value

    def fill(match: re.Match[str]) -> str:
        if (name := match["name"]) is None:
            return "$"
        given = variables.get(name)
        if match["how"] == ":-":
            return given or match["otherwise"]
        if match["how"] == "-":
            return match["otherwise"] if given is None else given
        assert match["how"] is None or given, f"{name}: {match['otherwise']}"
        return given or ""

    return _VARIABLE.sub(fill, value)


class _Override(list[Any]):
    """A list that takes the place of the one in an earlier compose file, instead of being joined to it."""


class _Loader(yaml.SafeLoader):
    """Knows `!override`."""


def _override(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> _Override:
    return _Override(loader.construct_sequence(node, deep=True))


_Loader.add_constructor("!override", _override)


def read(path: Path) -> Any:
    """The content of a compose file."""
    return yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 - a safe loader


def laid_over(base: Any, overlay: Any) -> Any:
    """Apply a further compose file to a value: mappings are merged, lists joined, the rest replaced."""
    if isinstance(overlay, _Override):
        return list(overlay)
    if isinstance(base, dict) and isinstance(overlay, dict):
        both = {key: laid_over(base[key], overlay[key]) for key in base.keys() & overlay.keys()}
        return base | overlay | both
    if isinstance(base, list) and isinstance(overlay, list):
        return base + overlay
    return overlay


def services(
    *profiles: str, variables: Mapping[str, str] | None = None, overlays: Sequence[Path] = ()
) -> dict[str, dict[str, Any]]:
    """The services that `up` starts with these profiles, by name."""
    config: dict[str, Any] = {}
    for path in (COMPOSE_FILE, *overlays):
        config = laid_over(config, interpolated(read(path), variables or {}))
    chosen: dict[str, dict[str, Any]] = {
        name: service
        for name, service in config["services"].items()
        if not service.get("profiles") or set(service["profiles"]) & set(profiles)
    }
    for name, service in chosen.items():
        for needed in service.setdefault("depends_on", {}):
            assert needed in chosen, f"{name} needs {needed}, which is off"
    return chosen


def set_environment(patch: pytest.MonkeyPatch, variables: Mapping[str, object]) -> None:
    """Set these variables, and none of Tandem's beside them."""
    for variable in [variable for variable in os.environ if variable.startswith("TANDEM_")]:
        patch.delenv(variable)
    for variable, value in variables.items():
        patch.setenv(variable, str(value))
