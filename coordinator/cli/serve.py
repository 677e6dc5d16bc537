"""`tandem serve`: start one service in this process."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import typer

from tandem.errors import ConfigurationError
from tandem.settings import exit_with

SERVICES = {"draft": "draft_service", "target": "target_service", "coordinator": "coordinator"}
"""The package of each service."""

_USAGE = """Usage: tandem serve SERVICE [OPTIONS]

Start one service: draft, target or coordinator. `tandem serve SERVICE --help` lists its options.
"""


def serve(context: typer.Context) -> None:
    """Start one service: draft, target or coordinator. `tandem serve SERVICE --help` lists its options."""
    service, *arguments = context.args or [""]
    if service in ("", "--help", "-h"):
        sys.stdout.write(_USAGE)
        raise typer.Exit(0 if service else 2)
    package = SERVICES.get(service)
    if package is None:
        exit_with(
            ConfigurationError(f"there is no service {service!r}; it must be one of {', '.join(SERVICES)}"), 2
        )
        return
    if importlib.util.find_spec(package) is None:
        exit_with(ConfigurationError(f"the {service} service is not installed here (package {package})"), 2)
    # Found by name, not imported above: the coordinator's image holds no other service, and no torch.
    importlib.import_module(f"{package}.__main__").run(arguments)
