"""`tandem serve` and `tandem bench`, which hand their arguments on."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from difflib import get_close_matches

import typer

from tandem.errors import ConfigurationError
from tandem_coordinator.cli.main import app

SERVICES = {
    "draft": "tandem_draft",
    "target": "tandem_target",
    "coordinator": "tandem_coordinator",
}
"""The package of each service."""

_HANDED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Arguments are passed on unchanged: settings list their options once."""


@app.command(context_settings=_HANDED_ON)
def serve(context: typer.Context) -> None:
    """Start one service: draft, target or coordinator. `tandem serve SERVICE --help` lists its options."""
    service, *arguments = context.args or [""]
    if service in ("", "--help", "-h"):
        sys.stdout.write(f"Usage: tandem serve SERVICE [OPTIONS]\n\n{serve.__doc__}\n")
        raise typer.Exit(0 if service else 2)
    package = SERVICES.get(service)
    if package is None:
        near = get_close_matches(service, SERVICES)
        advice = f"did you mean {near[0]}?" if near else f"it must be one of {', '.join(SERVICES)}"
        raise ConfigurationError(f"there is no service {service!r}; {advice}")
    if importlib.util.find_spec(package) is None:
        raise ConfigurationError(f"the {service} service is not installed here (package {package})")
    # Found by name, not imported above: the coordinator's image holds no other service, and no torch.
    importlib.import_module(f"{package}.__main__").run(arguments)


_NEEDED = {
    "benchmarks.bench": "it is part of Tandem's repository, not of the installed package; run it in a "
    "checkout: make bench. A load needs no checkout: tandem bench --clients 8",
    "torch": "install the models' side as well: pip install 'tandem-speculative[engine]'",
}
"""Packages that a comparison needs, and how to get them."""


def sends_load(arguments: Sequence[str]) -> bool:
    """True if these arguments of `tandem bench` ask for a load on a server in place of a comparison."""
    return any(word.partition("=")[0] in ("--clients", "--rate", "--http") for word in arguments)


@app.command(context_settings=_HANDED_ON)
def bench(context: typer.Context) -> None:
    """Compare ways of decoding on this machine; --clients, --rate or --http send a load. `--help` lists options."""
    is_load = sends_load(context.args)
    needed = {"httpx2": "install it as well: pip install 'tandem-speculative[load]'"} if is_load else _NEEDED
    for package, advice in needed.items():
        if importlib.util.find_spec(package) is None:
            raise ConfigurationError(f"tandem bench needs {package}, which is not installed here; {advice}")
    # Found by name, as services are: nothing of the coordinator's needs torch.
    module = "tandem_load.generator" if is_load else "benchmarks.bench"
    importlib.import_module(module).run(context.args)
