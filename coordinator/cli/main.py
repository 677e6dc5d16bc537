"""The `tandem` command: one module for each of its verbs."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, NoReturn

import typer

from coordinator.cli import audit, generate, plan
from coordinator.cli.admin import admin
from coordinator.cli.command import FAILED, OK, command, new_app
from coordinator.cli.config import config
from coordinator.cli.connection import context
from coordinator.cli.serve import bench, serve
from coordinator.cli.up import up
from tandem import __version__
from tandem.settings import exit_with
from tandem.standard_streams import OutputError, fill_closed, unwritable

app = new_app("Speculative decoding with the draft model and the target model as separate services.")
# These pass their arguments on unchanged: each service's settings list its options once.
_HANDED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
app.command(context_settings=_HANDED_ON)(serve)
command(app)(up)
app.add_typer(config, name="config")
generate.add_to(app)
plan.add_to(app)
audit.add_to(app)
app.command(context_settings=_HANDED_ON)(bench)
app.add_typer(admin, name="admin")
app.add_typer(context, name="context")


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        sys.stdout.write(f"tandem {__version__}\n")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Speculative decoding with the draft model and the target model as separate services."""


_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Errors of a write to stdout: its device is full, over a quota or gone. No path belongs to them."""


def main() -> None:
    """Entry point of the console script."""
    try:
        fill_closed()
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        _refuse(error)
    except typer.Abort:
        sys.exit(FAILED)
    except BrokenPipeError:
        # The reader has closed the pipe; buffered output must not be written again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except OutputError as error:
        exit_with(error, FAILED)
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        exit_with(unwritable(error), FAILED)
    else:
        sys.exit(code if isinstance(code, int) else OK)


def _refuse(error: typer.TyperException) -> NoReturn:
    """End with one sentence, but with the whole help where no command was named at all."""
    message = error.format_message()
    if not message.startswith("Usage: "):
        message = f"error: {message[:1].lower()}{message[1:].rstrip('.')}"
    sys.stderr.write(message + "\n")
    sys.exit(error.exit_code)
