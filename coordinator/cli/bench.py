"""`tandem bench`: the benchmarks of a checkout."""

from __future__ import annotations

import importlib
import importlib.util

import typer

from tandem.errors import ConfigurationError
from tandem.settings import exit_with

_NEEDED = {
    "benchmarks": "it is part of Tandem's repository, not of the installed package; run it in a checkout: make bench",
    "torch": "install the models' side as well: pip install 'tandem-speculative[engine]'",
}


def bench(context: typer.Context) -> None:
    """Compare ways of decoding on this machine. `tandem bench --help` lists its options."""
    for package, advice in _NEEDED.items():
        if importlib.util.find_spec(package) is None:
            exit_with(
                ConfigurationError(f"tandem bench needs {package}, which is not installed here; {advice}"), 2
            )
    # Found by name, as services are: nothing of the coordinator's needs torch.
    importlib.import_module("benchmarks.bench").run(context.args)
