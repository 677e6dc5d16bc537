"""`tandem audit`, which the package tandem-audit brings."""

from __future__ import annotations

from importlib.metadata import entry_points

import typer

from tandem.errors import ConfigurationError
from tandem_coordinator.cli.main import app

GROUP = "tandem.verbs"
"""The group of entry points by which another package brings a verb: a function that is given the words behind the verb
and the words that called it, and returns an exit code."""


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def audit(context: typer.Context) -> None:
    """Check whether an OpenAI-compatible server's speculative decoding is lossless."""
    # Found by name: nothing here imports that package, which knows nothing of this one.
    found = next(iter(entry_points(group=GROUP, name="audit")), None)
    if found is None:
        raise ConfigurationError(
            "tandem audit needs the package tandem-audit, which is not installed here; install it: pip install "
            "tandem-audit"
        )
    raise typer.Exit(found.load()(context.args, "tandem audit"))
