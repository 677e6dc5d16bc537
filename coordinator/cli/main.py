"""The `tandem` command: one module for each of its verbs."""

from __future__ import annotations

import typer

from coordinator.cli.bench import bench
from coordinator.cli.config import config
from coordinator.cli.generate import generate
from coordinator.cli.serve import serve
from coordinator.cli.up import up

app = typer.Typer(
    name="tandem",
    help="Speculative decoding with the draft model and the target model as separate services.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
# These hand their arguments on as they are: each service's options are listed once, in its own settings.
_HANDED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
app.command(context_settings=_HANDED_ON)(serve)
app.command()(up)
app.add_typer(config, name="config")
app.command()(generate)
app.command(context_settings=_HANDED_ON)(bench)


def main() -> None:
    """Entry point of the console script."""
    app()
