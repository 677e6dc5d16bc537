"""`tandem bench`: the benchmarks of a checkout."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

import typer

from tandem.errors import ConfigurationError
from tandem.settings import exit_with

_NEEDED = {
    "benchmarks": "it is part of Tandem's repository, not of the installed package; run it in a checkout: make bench",
    "torch": "install the models' side as well: pip install 'tandem-speculative[engine]'",
}

_OF_LOADS = ("--clients", "--rate", "--http")
"""Options that ask for a load on a server in place of a comparison."""


def sends_load(arguments: Sequence[str]) -> bool:
    """True if these arguments of `tandem bench` ask for a load."""
    return any(word.partition("=")[0] in _OF_LOADS for word in arguments)


def bench(context: typer.Context) -> None:
    """Compare ways of decoding on this machine; --clients, --rate or --http send a load. `--help` lists options."""
    is_load = sends_load(context.args)
    needed = {name: advice for name, advice in _NEEDED.items() if name != "torch" or not is_load}
    for package, advice in needed.items():
        if importlib.util.find_spec(package) is None:
            exit_with(
                ConfigurationError(f"tandem bench needs {package}, which is not installed here; {advice}"), 2
            )
    # Found by name, as services are: nothing of the coordinator's needs torch.
    importlib.import_module("benchmarks.load.generator" if is_load else "benchmarks.bench").run(context.args)
