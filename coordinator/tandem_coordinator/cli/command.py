"""Shared by all commands: option groups, examples in the help, forms of output."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, getdoc, iscoroutine, signature
from typing import Annotated, Any, Literal, get_type_hints

import typer
import yaml
from rich.console import Console, RenderableType
from rich.table import Table

from tandem_coordinator.admin.plain import plain
from tandem_coordinator.cli.main import CommandGroup


def option(text: str, *flags: str, default: Any = None, **more: Any) -> Any:
    """A field of a dataclass of options: its help, its flags where its name does not say them, and `typer.Option`'s."""
    return field(default=default, metadata={"typer": typer.Option(*flags, help=text, **more)})


Form = Literal["table", "json", "yaml"]


@dataclass(frozen=True)
class OutputOptions:
    """The form of the result."""

    output: Form = option(
        "Form of the result.", "--output", "-o", default="table", envvar="TANDEM_CLIENT_OUTPUT"
    )
    as_json: bool = option("The same as --output json.", "--json", default=False)

    @property
    def form(self) -> Form:
        """The form that either option asks for."""
        return "json" if self.as_json else self.output

    def show(
        self, result: object, table: Callable[[], RenderableType], *, is_one_of_many: bool = False
    ) -> None:
        """Print a result. One of many is a line of JSON, a document of YAML, or a table and an empty line."""
        if self.form == "json":
            indent = None if is_one_of_many else 2
            sys.stdout.write(json.dumps(plain(result), indent=indent, ensure_ascii=False) + "\n")
        elif self.form == "yaml":
            text = yaml.safe_dump(plain(result), sort_keys=False, allow_unicode=True)
            sys.stdout.write("---\n" * is_one_of_many + text)
        else:
            print_parts(table(), *[""] * is_one_of_many)
        sys.stdout.flush()


def print_parts(*parts: RenderableType) -> None:
    """Write to a terminal in colour and in its width, elsewhere as it is and without spaces at the ends of lines."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(*parts, sep="\n")
    else:
        sys.stdout.write(as_text(*parts, width=1000))  # not cut to the width of a terminal


def as_text(*parts: RenderableType, width: int) -> str:
    """The output without colours."""
    console = Console(highlight=False, width=width, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    return "".join(line.rstrip() + "\n" for line in captured.get().splitlines())


def plain_table(*columns: str, title: str | None = None, title_style: str = "dim") -> Table:
    """A table without lines. A column whose name begins with > is aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.title, table.title_justify, table.title_style = title, "left", title_style
    for name in columns:
        side: Literal["left", "right"] = "right" if name.startswith(">") else "left"
        table.add_column(name.removeprefix(">"), justify=side, no_wrap=True)
    return table


def command(
    group: CommandGroup, *examples: str, name: str = "", **more: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a function to a group as a command, by default under the first word of its name.

    A parameter whose type is a dataclass stands for all of its fields, each a separate option with a default; a
    `typer.Context` is passed on. The examples are what may follow the command; its help shows them. `more` is for
    typer.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        called = name or function.__name__.partition("_")[0]
        lines = [f"  {group.path} {called} {each}".rstrip() for each in examples]
        # \b keeps the lines of a paragraph as they are.
        shown = ["", "\b", "Examples:", *lines] if examples else []
        text = "\n".join([getdoc(function) or "", *shown])
        group.command(called, help=text, **more)(_with_groups(function))
        return function

    return add


def _with_groups(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the fields of its dataclasses as parameters, run to its end."""
    given, keyword = signature(function, eval_str=True).parameters, Parameter.KEYWORD_ONLY
    groups: dict[str, Any] = {
        name: each.annotation for name, each in given.items() if is_dataclass(each.annotation)
    }
    # A command's own options come first in its help.
    parameters = [each.replace(kind=keyword) for name, each in given.items() if name not in groups]
    for group in groups.values():
        hints = get_type_hints(group, include_extras=True)
        for each in fields(group):
            annotation = hints[each.name]
            if described := each.metadata.get("typer"):
                annotation = Annotated[annotation, described]
            parameters.append(Parameter(each.name, keyword, default=each.default, annotation=annotation))

    @wraps(function)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{each.name: values.pop(each.name) for each in fields(group)})
        result = function(**values)
        if iscoroutine(result):
            asyncio.run(result)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
