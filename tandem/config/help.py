"""The command line of a settings class: its flags under headings, a short help and a whole one."""

from __future__ import annotations

import inspect
import re
import shutil
import sys
import textwrap
from argparse import SUPPRESS, Action, ArgumentParser, BooleanOptionalAction, HelpFormatter
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from tandem.config.options import SHORT_HELP
from tandem.config.rule import spell

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
    "ServiceAdminOptions": "Administration",
    "ServerSettings": "Server",
    "ProtectionOptions": "TLS and tokens",
    "TelemetryOptions": "Metrics and traces",
    "SourceOptions": "Config file",
    "VllmSettings": "Drafting",
}
"""Heading of the options that a class brings, in the order of the help."""


_SHORT_TITLES = {
    "Coordinator": "Services",
    "Model": "Model",
    "Drafting": "Speculative decoding",
    "Acceptance": "Speculative decoding",
    "Server": "Server",
    "HTTP": "Server",
    "Metrics and traces": "Server",
    "Config file": "Server",
    "TLS and tokens": "TLS and tokens",
}
"""Headings of the short help, by those of the whole one."""


class OptionParser(ArgumentParser):
    """The command line of a settings class, filled by pydantic-settings. Where some of its options are marked
    `SHORT_HELP`, `--help` lists these alone, and `--help-all` lists everything."""

    def __init__(self, cls: type[Any], program: str, width: int | None = None) -> None:
        self._form: Mapping[str, Any] = {
            "prog": program,
            "usage": "%(prog)s [OPTIONS]",
            "description": cls.about(),
            "formatter_class": lambda prog: _Help(
                prog, max_help_position=34, width=width or min(shutil.get_terminal_size().columns, 100)
            ),
            "add_help": False,
        }
        super().__init__(**self._form, allow_abbrev=False, exit_on_error=False, argument_default=SUPPRESS)
        self._cls = cls
        titles = dict.fromkeys((*GROUPS.values(), "Options"))
        self._groups = {title: self.add_argument_group(title) for title in titles}
        self._short: list[tuple[str, str, Mapping[str, Any]]] = []
        # An option belongs to the class that first brought it.
        self._owners = {name: base.__name__ for base in cls.__mro__ for name in inspect.get_annotations(base)}
        has_short = any(SHORT_HELP in field.metadata for field in cls.model_fields.values())
        self.add_argument(
            "-h", "--help", action=_ShowShortHelp if has_short else "help", help="Show this help."
        )
        if has_short:
            self.add_argument("--help-all", action="help", help="Show all options.")

    def add_option(
        self, *flags: str, dest: str | None = None, action: Any = None, nargs: Any = None, **_: Any
    ) -> None:
        """Add an option, as pydantic-settings describes it to argparse, with our words under our heading. A positional
        one has no `dest`."""
        name = dest or flags[0]
        field = self._cls.model_fields[name]
        if name in getattr(self._cls, "repeatable", ()):
            action = "append"
        metavar = f"<{kind(field.annotation)}>" if dest else name.upper()
        how = {"dest": dest, "action": action, "nargs": nargs, "metavar": metavar}
        if action is BooleanOptionalAction:
            del how["metavar"]
        how = {key: value for key, value in how.items() if value is not None}
        meaning = " ".join((field.description or "").split())
        note = _note(field)
        title = GROUPS.get(self._owners[name], "Options")
        notes = "; ".join(filter(None, (f"env var: {self._cls.variable(name)}", note)))
        self._groups[title].add_argument(*flags, **how, help=_escape(f"{meaning} [{notes}]"))
        if SHORT_HELP in field.metadata:
            first = _SENTENCE_END.split(meaning)[0].rstrip(".")
            words = first if note in ("", "default: false") else f"{first} [{note}]"
            self._short.append((title, flags[0], {**how, "help": _escape(words)}))

    def format_short_help(self) -> str:
        """The help of the options that most people need."""
        epilog = "--help-all lists all options, each with the variable that sets it too."
        parser = ArgumentParser(**self._form, epilog=epilog)
        groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(_SHORT_TITLES.values())}
        for title, flag, how in self._short:
            groups[_SHORT_TITLES[title]].add_argument(flag, **how)
        return parser.format_help()


def _note(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    return "" if default in (None, "", ()) else f"default: {spell(default)}"


def _escape(text: str) -> str:
    """A help that argparse formats with %."""
    return text.replace("%", "%%")


_SENTENCE_END = re.compile(r"(?<=[a-zA-Z0-9)])[.;] ")
"""Ends the words of an option that the short help shows."""


class _ShowShortHelp(Action):
    def __init__(self, **how: Any) -> None:
        super().__init__(**how, nargs=0)

    def __call__(self, parser: ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, OptionParser)
        sys.stdout.write(parser.format_short_help())
        parser.exit()


class _Help(HelpFormatter):
    """Breaks no option's name in two, and keeps paragraphs, and lines that are indented as they are."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        super().add_usage(usage, actions, groups, "Usage: ")

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = inspect.cleandoc(text).split("\n\n")
        return "\n\n".join(
            each if each.startswith(" ") else super(_Help, self)._fill_text(each, width, indent)
            for each in paragraphs
        )

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def kind(annotation: Any) -> str:
    """The form of an option's value in one word."""
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin in (Annotated, Union, UnionType):
        return kind(arguments[0])
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "|".join(str(each.value) for each in annotation)
    if origin is tuple:
        return f"list of {kind(arguments[0])}"
    return {Path: "path", int: "int", float: "float", bool: "bool"}.get(annotation, "str")
