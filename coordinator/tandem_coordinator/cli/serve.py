"""`tandem serve` and `tandem bench`, which hand their arguments on."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import zip_longest

import typer

from tandem.config.names import OWN_METHODS, canonical_method
from tandem.errors import ConfigurationError
from tandem_coordinator.cli.main import app

SERVICES = {
    "draft": "tandem_draft",
    "target": "tandem_target",
    "coordinator": "tandem_coordinator",
}
"""The package of each service."""

BOUND_PACKAGE = "tandem_bound"
"""Package of a target with a draft beside it."""

_HANDED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Arguments are passed on unchanged: settings list their options once."""


@app.command(context_settings=_HANDED_ON)
def serve(context: typer.Context) -> None:
    """Start one service: draft, target or coordinator. `tandem serve SERVICE --help` lists its options."""
    service, *arguments = context.args or [""]
    if service in ("", "--help", "-h"):
        sys.stdout.write(f"Usage: tandem serve SERVICE [OPTIONS]\n\n{serve.__doc__}\n")
        raise typer.Exit(0 if service else 2)
    package = package_of(service, arguments)
    if package is None:
        near = get_close_matches(service, SERVICES)
        advice = f"did you mean {near[0]}?" if near else f"it must be one of {', '.join(SERVICES)}"
        raise ConfigurationError(f"there is no service {service!r}; {advice}")
    if importlib.util.find_spec(package) is None:
        raise ConfigurationError(f"the {service} service is not installed here (package {package})")
    # Found by name, not imported above: the coordinator's image holds no other service, and no torch.
    importlib.import_module(f"{package}.__main__").run(arguments)


def package_of(service: str, arguments: Sequence[str]) -> str | None:
    """The package that serves with these options; None for an unknown service."""
    # The method of the target's options, or else the one that all processes share in the environment.
    methods = [_target_option(arguments, name) for name in ("METHOD", "SPECULATIVE_METHOD")]
    methods += [os.environ.get(f"TANDEM_{name}", "") for name in ("METHOD", "SPECULATIVE_METHOD")]
    is_own = canonical_method(next(filter(None, methods), "")) in OWN_METHODS
    if service == "target" and (is_own or _target_option(arguments, "DRAFT_MODEL")):
        return BOUND_PACKAGE
    return SERVICES.get(service)


def _target_option(arguments: Sequence[str], option: str) -> str:
    """The value of an option on the command line or in the environment; empty without one."""
    flag = "--" + option.lower().replace("_", "-")
    for word, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if name == flag:
            return value if equals else following
    return os.environ.get(f"TANDEM_TARGET_{option}", "")


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
