"""Base of the `tandem` commands: groups of options, examples in the help, and errors in one sentence."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

import typer

from coordinator.cli.exit_codes import exit_code
from tandem.errors import TandemError
from tandem.settings import exit_with


def new_app(help_text: str) -> typer.Typer:
    """A group of commands. Help without boxes: it has room for the whole name of an option."""
    return typer.Typer(
        help=help_text,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def command(
    app: typer.Typer, *examples: str, name: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a function to an app as a command.

    A parameter whose type is a dataclass stands for all of its fields, each a separate option; a `typer.Context` is
    passed on. A `TandemError` ends the process with a sentence and its exit code.

    Args:
        app: The app.
        examples: Command lines for the help.
        name: The command's; by default the function's.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        app.command(name, help=_help(function, examples))(_with_groups(function))
        return function

    return add


@contextmanager
def errors_to_exit() -> Iterator[None]:
    """End the process with one sentence and the right code when the block raises one of our errors."""
    try:
        yield
    except TandemError as error:
        exit_with(error, exit_code(error))


def _help(function: Callable[..., Any], examples: Sequence[str]) -> str:
    text = inspect.getdoc(function) or ""
    if not examples:
        return text
    # \b keeps the lines of a paragraph as they are.
    return "\n".join([text, "", "\b", "Examples:", *(f"  {example}" for example in examples)])


def _with_groups(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the fields of its dataclasses as parameters, run to its end, with errors printed."""
    given = inspect.signature(function, eval_str=True).parameters
    groups: dict[str, Any] = {
        name: parameter.annotation for name, parameter in given.items() if is_dataclass(parameter.annotation)
    }
    # A command's own options come first in its help.
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in given.items()
        if name not in groups
    ]
    for group in groups.values():
        parameters += _parameters(group)

    @wraps(function)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        with errors_to_exit():
            result = function(**values)
            if inspect.iscoroutine(result):
                _run(result)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def _parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=hints[field.name]
        )
        for field in fields(group)
    ]


def _default(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default
