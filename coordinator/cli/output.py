"""Output of a command: its result and nothing else, as a table for people or as JSON or YAML for programs."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from enum import Enum, IntEnum
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console, RenderableType
from rich.table import Table

from coordinator.stats.speculation import describe
from tandem.speculation_state import SpeculationDecision, SpeculationState
from tandem.types import SpeculationStats

# Piped output is not cut to the width of a terminal.
_ENDLESS = 1000


class OutputForm(Enum):
    """How a result is printed."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How the result is printed."""

    output: Annotated[
        OutputForm,
        typer.Option("--output", "-o", help="Form of the result.", envvar="TANDEM_CLIENT_OUTPUT"),
    ] = OutputForm.TABLE

    def show(self, result: object, table: Callable[[], RenderableType]) -> None:
        """Print a result."""
        if self.output is OutputForm.JSON:
            sys.stdout.write(json.dumps(plain(result), indent=2, ensure_ascii=False) + "\n")
        elif self.output is OutputForm.YAML:
            sys.stdout.write(as_yaml(result))
        else:
            print_parts(table())

    def show_next(self, result: object, table: Callable[[], RenderableType]) -> None:
        """Print one of many results: a line of JSON, a document of YAML, or a table and an empty line."""
        if self.output is OutputForm.JSON:
            sys.stdout.write(json.dumps(plain(result), ensure_ascii=False) + "\n")
        elif self.output is OutputForm.YAML:
            sys.stdout.write("---\n" + as_yaml(result))
        else:
            print_parts(table(), "")
        sys.stdout.flush()


def print_parts(*parts: RenderableType) -> None:
    """Write to a terminal in colour and in its width, elsewhere as it is and without spaces at the ends of lines."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(*parts, sep="\n")
    else:
        sys.stdout.write(as_text(*parts, width=_ENDLESS))


def as_text(*parts: RenderableType, width: int) -> str:
    """The output without colours."""
    console = Console(highlight=False, width=width, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    return "".join(line.rstrip() + "\n" for line in captured.get().splitlines())


def as_yaml(result: object) -> str:
    """A result as YAML."""
    text: str = yaml.safe_dump(plain(result), sort_keys=False, allow_unicode=True)
    return text


def plain(value: object) -> Any:
    """A value in the types that JSON has. Speculation statistics become an object with their names."""
    if isinstance(value, SpeculationStats):
        return describe(value)
    if isinstance(value, SpeculationState | SpeculationDecision):
        return plain(value.as_dict())
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        entries = [plain(entry) for entry in value]
        return entries if isinstance(value, list | tuple) else sorted(entries)
    return _leaf(value)


def _leaf(value: object) -> object:
    match value:
        case IntEnum():
            return value.name.lower()
        case Enum():
            return value.value
        case datetime():
            return value.isoformat(timespec="milliseconds")
        case float():
            return round(value, 6)
        case _:
            return value


def plain_table(*columns: str) -> Table:
    """A table without lines. A column whose name begins with > is aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(
            name.removeprefix(">"), justify="right" if name.startswith(">") else "left", no_wrap=True
        )
    return table
