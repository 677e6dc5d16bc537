"""The `tandem` command: one module for each of its verbs."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import typer

from coordinator.cli import generate
from coordinator.cli.admin import admin
from coordinator.cli.bench import bench
from coordinator.cli.command import new_app
from coordinator.cli.config import config
from coordinator.cli.context import context
from coordinator.cli.exit_codes import FAILED, OK
from coordinator.cli.serve import serve
from coordinator.cli.up import up

app = new_app("Speculative decoding with the draft model and the target model as separate services.")
# These hand their arguments on as they are: each service's options are listed once, in its own settings.
_HANDED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
app.command(context_settings=_HANDED_ON)(serve)
app.command()(up)
app.add_typer(config, name="config")
generate.add_to(app)
app.command(context_settings=_HANDED_ON)(bench)
app.add_typer(admin, name="admin")
app.add_typer(context, name="context")


def main() -> None:
    """Entry point of the console script."""
    try:
        code = app(standalone_mode=False)
    except typer.TyperException as error:
        _refuse(error)
    except typer.Abort:
        sys.exit(FAILED)
    except BrokenPipeError:
        # Whoever read the output has had enough; what is still buffered for it must not be tried again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    sys.exit(code if isinstance(code, int) else OK)


def _refuse(error: typer.TyperException) -> NoReturn:
    """End with one sentence, but with the whole help where no command was named at all."""
    message = error.format_message()
    if not message.startswith("Usage: "):
        message = f"error: {message[:1].lower()}{message[1:].rstrip('.')}"
    sys.stderr.write(message + "\n")
    sys.exit(error.exit_code)
