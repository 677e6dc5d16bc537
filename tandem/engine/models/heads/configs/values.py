"""Reads the values of a drafting head's `config.json`, and refuses others in one sentence. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.errors import ModelFolderError


def size(path: Path, content: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A number of at least 1.

    Raises:
        ModelFolderError: the value is none, or is missing and has no default.
    """
    value = content.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelFolderError(f"the file {path} should have a positive number {key}, but it is {value!r}")
    return value


def flag(path: Path, content: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    """True or false.

    Raises:
        ModelFolderError: the value is neither.
    """
    value = content.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelFolderError(f"the file {path} should have true or false for {key}, but it is {value!r}")
    return value


def nested(path: Path, content: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An object within the file.

    Raises:
        ModelFolderError: the value is none.
    """
    value = content.get(key)
    if not isinstance(value, dict):
        raise ModelFolderError(f"the file {path} should have an object {key}, but it is {value!r}")
    return value


def check_layer(path: Path, layer: Mapping[str, Any], owner: str) -> None:
    """Refuse what a head's one Llama layer does not compute here.

    Args:
        path: the file.
        layer: the layer's config.
        owner: a head of this method, for the sentence.

    Raises:
        ModelFolderError: it says something else.
    """
    wanted = {"num_hidden_layers": (1, None), "hidden_act": ("silu", None), "attention_bias": (False, None)}
    wanted |= {"mlp_bias": (False, None), "use_sliding_window": (False, None), "qkv_bias": (False, None)}
    for key, allowed in wanted.items():
        if (value := layer.get(key)) not in allowed:
            raise ModelFolderError(f"the file {path} has {key} {value!r}; {owner} has {allowed[0]!r} here")
