"""The help of a service: its options in groups, each with its default and its environment variable."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tandem.config.options import ALIASES, ENVIRONMENT_PREFIX
from tandem.config.rule import spelled
from tandem.config.speculative import SpeculativeConfig

GROUPS = {
    "ModelServerSettings": "Model",
    "RevisionOptions": "Model from a Hugging Face hub",
    "CoordinatorSettings": "Coordinator",
    "DraftSettings": "Drafting",
    "TargetSettings": "Drafting",
    "DraftingOptions": "Drafting",
    "SpeculativeConfig": "Speculative decoding",
    "AcceptanceOptions": "Acceptance",
    "RequestBounds": "Bounds of a request",
    "ServiceAccessOptions": "Access to the services",
    "HttpOptions": "HTTP",
    "AdminOptions": "Administration",
    "ServerSettings": "Server",
    "ProtectionOptions": "TLS and tokens",
    "TelemetryOptions": "Metrics and traces",
    "SourceOptions": "Config file",
}
"""Heading of the options that a class brings, in the order of the help."""
OTHERS = "Other options"

_TYPES = {Path: "path", int: "int", float: "float", str: "str", SecretStr: "str", bool: "bool"}
_INDENT = 34
_WIDEST = 100


def help_text(cls: type[BaseModel], program: str, width: int | None = None) -> str:
    """Format the output of `program --help`.

    Args:
        cls: The service's class of settings.
        program: The command, for instance "tandem serve target".
        width: Of the text, in characters; by default the terminal's, up to 100.
    """
    width = width or min(shutil.get_terminal_size().columns, _WIDEST)
    lines = [f"Usage: {program} [OPTIONS]", "", *_wrapped((cls.__doc__ or "").strip(), width, 2)]
    for title, names in _grouped(cls).items():
        lines += ["", f"{title}:"]
        for name in names:
            lines += _option(cls, name, width)
    if not {"-h"} & {*cls.model_fields}:
        lines += ["", *_described("-h, --help", "Show this message and exit.", width)]
    return "\n".join(lines) + "\n"


def group_of(cls: type[BaseModel], name: str) -> str:
    """The heading under which an option stands: that of the class which first brought it."""
    owner = next(base for base in reversed(cls.__mro__) if name in inspect.get_annotations(base))
    return GROUPS.get(owner.__name__, OTHERS)


def _grouped(cls: type[BaseModel]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {title: [] for title in (*GROUPS.values(), OTHERS)}
    for name in cls.model_fields:
        found[group_of(cls, name)].append(name)
    return {title: names for title, names in found.items() if names}


def _option(cls: type[BaseModel], name: str, width: int) -> Iterator[str]:
    field = cls.model_fields[name]
    word = "--" + name.replace("_", "-")
    kind = _kind(field.annotation)
    others = [f", --{alias.replace('_', '-')}" for alias, own in ALIASES.items() if own == name]
    head = f"{word} / --no-{word[2:]}" if kind == "bool" else f"{word}{''.join(others)} <{kind}>"
    shared = name in SpeculativeConfig.model_fields
    prefix = ENVIRONMENT_PREFIX if shared else str(cls.model_config.get("env_prefix") or ENVIRONMENT_PREFIX)
    notes = [f"env var: {prefix}{name.upper()}", *_default(field)]
    text = " ".join((field.description or "").split())
    return iter(_described(head, f"{text}  [{'; '.join(notes)}]", width))


def _default(field: FieldInfo) -> Iterator[str]:
    if field.is_required():
        yield "required"
    elif field.default is not None and field.default is not PydanticUndefined:
        yield f"default: {spelled(field.default)}"


def _kind(annotation: Any) -> str:
    """Value that the option takes, in a word."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin in (Union, UnionType):
        return _kind(next(one for one in arguments if one is not NoneType))
    if origin in (list, tuple):
        return f"list of {_kind(arguments[0])}"
    return _TYPES.get(annotation, "str")


def _described(head: str, text: str, width: int) -> list[str]:
    lines = _wrapped(text, width, _INDENT)
    if len(head) + 4 > _INDENT:
        return [f"  {head}", *lines]
    return [f"  {head}".ljust(_INDENT) + lines[0].lstrip(), *lines[1:]]


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    space = " " * indent
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=space,
        subsequent_indent=space,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [""]
