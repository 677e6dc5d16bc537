"""`python -m coordinator`: start the coordinator."""

from __future__ import annotations

import sys

import uvloop

from coordinator.service import CoordinatorService
from coordinator.settings.coordinator import CoordinatorSettings
from tandem.logs import configure
from tandem.serving.server import exit_codes, main
from tandem.settings import load_settings
from tandem.standard_streams import fill_closed

_PROGRAM = "tandem serve coordinator"


def run(arguments: list[str]) -> None:
    """Start the coordinator with these command-line arguments, and serve until a signal ends it."""
    with exit_codes():
        fill_closed()
        settings = load_settings(CoordinatorSettings, arguments, _PROGRAM)
    if settings.workers == 1:
        main(CoordinatorSettings, CoordinatorService, arguments, _PROGRAM)
        return
    from coordinator.workers.supervisor import Supervisor

    with exit_codes():
        configure(settings.log_level, settings.log_format)
        code = uvloop.run(Supervisor(settings, arguments).run())
    sys.exit(code)


if __name__ == "__main__":
    run(sys.argv[1:])
