"""Groups of commands and their exit codes. Imports little: the help of `tandem` needs no more."""

from __future__ import annotations

from enum import IntEnum

import typer

from tandem import errors


class Exit(IntEnum):
    """Exit codes, which the help of `tandem admin` lists."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNHEALTHY = 3
    UNREACHABLE = 4
    REFUSED = 5


_EXIT_CODES: tuple[tuple[type[errors.TandemError], Exit], ...] = (
    (errors.ModelFolderError, Exit.FAILED),
    (errors.ConfigurationError, Exit.USAGE),
    (errors.ServiceUnavailableError, Exit.UNREACHABLE),
    (errors.InvalidRequestError, Exit.REFUSED),
    (errors.UnauthenticatedError, Exit.REFUSED),
    (errors.PermissionDeniedError, Exit.REFUSED),
    (errors.CapacityError, Exit.REFUSED),
    (errors.TandemError, Exit.FAILED),
)


def exit_code(error: errors.TandemError) -> Exit:
    """The exit code for a kind of failure."""
    return next(code for kind, code in _EXIT_CODES if isinstance(error, kind))


class CommandGroup(typer.Typer):
    """A group of commands. Help without boxes: it has room for the whole name of an option."""

    def __init__(self, help_text: str, parent: CommandGroup | None = None, name: str = "tandem") -> None:
        super().__init__(
            help=help_text,
            no_args_is_help=True,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"]},
        )
        self.path: str = name if parent is None else f"{parent.path} {name}"
        """The words that call it."""
        if parent is not None:
            parent.add_typer(self, name=name)


verbs = CommandGroup("")
"""The verbs of `tandem` whose modules are imported."""
