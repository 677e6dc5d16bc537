"""Shared by all commands: option groups, examples in the help, forms of output."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from copy import copy
from functools import wraps
from inspect import Parameter, Signature, getdoc, isclass, iscoroutine, signature
from typing import Annotated, Any, ClassVar, Literal

import typer
import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from rich.console import Console, RenderableType
from rich.table import Table
from typer.core import TyperCommand
from typer.models import ArgumentInfo, OptionInfo

from tandem.config.help import kind
from tandem.config.options import allowed_range, flag, sentences, unknown_option
from tandem.config.rule import spell
from tandem.config.sources import OwnSources
from tandem.errors import ConfigurationError
from tandem_coordinator.admin.plain import plain
from tandem_coordinator.cli.main import CommandGroup

# ---- options of verbs


class VerbOptions(OwnSources):
    """A group of a verb's options, each a field with its help as its docstring.

    Typer splits the command line into words; this class knows types, defaults and variables. A `typer.Option` or
    `typer.Argument` in a field's annotation spells it where its name does not.
    """

    model_config = SettingsConfigDict(
        env_prefix="TANDEM_CLIENT_", env_ignore_empty=True, enable_decoding=False, validate_default=False
    )

    env_prefix: ClassVar = "TANDEM_CLIENT_"
    reads_files: ClassVar = False
    with_variables: ClassVar[tuple[str, ...]] = ()
    """Options that this class reads from the environment as well."""
    repeatable: ClassVar[tuple[str, ...]] = ()
    """Options that may be given several times."""

    @classmethod
    def sources(cls, given: InitSettingsSource) -> tuple[PydanticBaseSettingsSource, ...]:
        """The command line, then the environment."""
        return (given, Variables(cls))

    @classmethod
    def has_variable(cls, name: str) -> bool:
        """True for an option that the environment may set."""
        return any(name in vars(base).get("with_variables", ()) for base in cls.__mro__)

    @classmethod
    def label(cls, place: Sequence[int | str], value: object) -> str:
        """An option's variable where that has the value, else its flag."""
        name = str(place[0])
        variable = cls.variable(name)
        if cls.has_variable(name) and os.environ.get(variable) == value:
            return variable
        if name not in cls.model_fields:
            return name
        return _first_flag(name, cls.model_fields[name])


class Variables(EnvSettingsSource):
    """The environment, as far as a group of options reads it."""

    settings_cls: type[VerbOptions]

    def __call__(self) -> dict[str, Any]:
        found = super().__call__()
        return {name: value for name, value in found.items() if self.settings_cls.has_variable(name)}


def _spelling_of(field: FieldInfo) -> OptionInfo | ArgumentInfo:
    given = (each for each in field.metadata if isinstance(each, OptionInfo | ArgumentInfo))
    return copy(next(given, typer.Option()))


def _first_flag(name: str, field: FieldInfo) -> str:
    """A flag of an option, a long one if there is any; the word by which the help calls an argument."""
    spelling = _spelling_of(field)
    if isinstance(spelling, ArgumentInfo):
        return str(spelling.metavar or name.upper())
    # In an annotation typer.Option takes its first flag for the default.
    flags = [each for each in (spelling.default, *(spelling.param_decls or ())) if isinstance(each, str)]
    flags.sort(key=lambda each: not each.startswith("--"))
    return flags[0].partition("/")[0] if flags else flag(name)


def _parameter_of(cls: type[VerbOptions], name: str, field: FieldInfo) -> Parameter:
    """An option as Typer parses it: words, which are None where it is not given."""
    spelling = _spelling_of(field)
    form = kind(field.annotation)
    words: Any = bool if form == "bool" else str
    if name in cls.repeatable:
        words = list[str]
        form = form.removeprefix("list of ")
    if words is not bool and isinstance(spelling, OptionInfo):
        spelling.metavar = spelling.metavar or f"<{form}>"
    if "|" in form:
        spelling.autocompletion = lambda: form.split("|")
    spelling.help = _help_of(cls, name, field)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[words | None, spelling])


def _help_of(cls: type[VerbOptions], name: str, field: FieldInfo) -> str:
    meaning = " ".join((field.description or "").split())
    notes = [f"env var: {cls.variable(name)}"] if cls.has_variable(name) else []
    default = field.get_default(call_default_factory=True)
    if default not in (None, "", ()) and default is not False:
        notes.append(f"default: {spell(default)}")
    if allowed := allowed_range(field):
        notes.append(allowed)
    if not notes:
        return meaning
    # A meaning that ends with a default in words has the brackets already.
    begin = f"{meaning[:-1]}; " if meaning.endswith("]") else f"{meaning} ["
    return f"{begin}{'; '.join(notes)}]"


Form = Literal["table", "json", "yaml"]


class OutputOptions(VerbOptions):
    """The form of the result."""

    with_variables: ClassVar[tuple[str, ...]] = ("output",)

    output: Annotated[Form, typer.Option("--output", "-o")] = "table"
    """Form of the result."""
    as_json: Annotated[bool, typer.Option("--json")] = False
    """The same as --output json."""

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
    table.title = title
    table.title_justify = "left"
    table.title_style = title_style
    for name in columns:
        side: Literal["left", "right"] = "right" if name.startswith(">") else "left"
        table.add_column(name.removeprefix(">"), justify=side, no_wrap=True)
    return table


# ---- verbs

_UNKNOWN = "tandem.unknown"
"""In the `meta` of a call: a sentence for each unknown option."""


class _Verb(TyperCommand):
    """A command that goes on after an unknown option, so that its function can tell all that is wrong at once."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {
            each.lstrip("-").replace("-", "_"): each
            for parameter in self.get_params(ctx)
            for each in (*parameter.opts, *parameter.secondary_opts)
            if each.startswith("--")
        }
        unknown: list[str] = ctx.meta.setdefault(_UNKNOWN, [])
        words = list(args)
        while True:
            try:
                return super().parse_args(ctx, list(words))
            except typer.TyperException as error:
                name = str(getattr(error, "option_name", ""))
                index = next((i for i, word in enumerate(words) if word.partition("=")[0] == name), None)
                if index is not None and name not in known.values() and name.startswith("--"):
                    unknown.append(unknown_option(name, known))
                    del words[index]
                    ctx.allow_extra_args = True  # what followed it may be its value
                elif unknown:
                    raise ConfigurationError("; ".join(unknown)) from None
                else:
                    raise


def command(
    group: CommandGroup, *examples: str, name: str = "", **more: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a function to a group as a command, by default under the first word of its name.

    A parameter whose type is a class of `VerbOptions` stands for all of its fields; a `typer.Context` is passed on. The
    examples are what may follow the command; its help shows them. `more` is for typer.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        called = name or function.__name__.partition("_")[0]
        lines = [f"  {group.path} {called} {each}".rstrip() for each in examples]
        # \b keeps the lines of a paragraph as they are.
        shown = ["", "\b", "Examples:", *lines] if examples else []
        text = "\n".join([getdoc(function) or "", *shown])
        group.command(called, cls=_Verb, help=text, **more)(_with_groups(function))
        return function

    return add


def _with_groups(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the fields of its option classes as parameters, run to its end."""
    given = signature(function, eval_str=True).parameters
    groups: dict[str, type[VerbOptions]] = {
        name: each.annotation
        for name, each in given.items()
        if isclass(each.annotation) and issubclass(each.annotation, VerbOptions)
    }
    context = next((name for name, each in given.items() if each.annotation is typer.Context), None)
    # A command's own options come first in its help.
    parameters = [
        each.replace(kind=Parameter.KEYWORD_ONLY) for name, each in given.items() if name not in groups
    ]
    if context is None:
        parameters.append(Parameter(_CALL, Parameter.KEYWORD_ONLY, annotation=typer.Context))
    for group in groups.values():
        parameters += [_parameter_of(group, name, field) for name, field in group.model_fields.items()]

    @wraps(function)
    def run(**values: Any) -> None:
        call: typer.Context = values.pop(_CALL) if context is None else values[context]
        wrong: list[str] = list(call.meta[_UNKNOWN])
        for name, group in groups.items():
            words = {each: values.pop(each) for each in group.model_fields}
            try:
                values[name] = group(**{each: word for each, word in words.items() if word is not None})
            except ValidationError as error:
                wrong += sentences(error)
            except ConfigurationError as error:
                wrong.append(str(error))
        if wrong:
            raise ConfigurationError("; ".join(wrong))
        result = function(**values)
        if iscoroutine(result):
            asyncio.run(result)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


_CALL = "typer_context"
"""Name of the parameter by which a function that wants none gets Typer's context."""
