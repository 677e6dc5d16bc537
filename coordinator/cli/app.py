"""Groups of commands and their exit codes. Imports little: the help of `tandem` needs no more."""

from __future__ import annotations

from enum import IntEnum

import typer

from tandem.errors import (
    CapacityError,
    ConfigurationError,
    InvalidRequestError,
    ModelFolderError,
    PermissionDeniedError,
    ServiceUnavailableError,
    TandemError,
    UnauthenticatedError,
)


class Exit(IntEnum):
    """Exit codes, which the help of `tandem admin` lists."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNHEALTHY = 3
    UNREACHABLE = 4
    REFUSED = 5


_EXIT_CODES: tuple[tuple[type[TandemError], Exit], ...] = (
    (ModelFolderError, Exit.FAILED),
    (ConfigurationError, Exit.USAGE),
    (ServiceUnavailableError, Exit.UNREACHABLE),
    (InvalidRequestError, Exit.REFUSED),
    (UnauthenticatedError, Exit.REFUSED),
    (PermissionDeniedError, Exit.REFUSED),
    (CapacityError, Exit.REFUSED),
    (TandemError, Exit.FAILED),
)


def exit_code(error: TandemError) -> Exit:
    """The exit code for a kind of failure."""
    return next(code for kind, code in _EXIT_CODES if isinstance(error, kind))


def new_app(help_text: str) -> typer.Typer:
    """A group of commands. Help without boxes: it has room for the whole name of an option."""
    return typer.Typer(
        help=help_text,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
