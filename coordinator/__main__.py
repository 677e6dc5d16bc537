"""`python -m coordinator`: start the coordinator."""

from __future__ import annotations

import sys

import uvloop

from coordinator.service import CoordinatorService
from coordinator.settings.coordinator import CoordinatorSettings
from tandem.serving.server import exit_codes, serve_to_the_end, settings_of_process


def run(arguments: list[str]) -> None:
    """Start the coordinator with these command-line arguments, and serve until a signal ends it."""
    with exit_codes():
        settings = settings_of_process(CoordinatorSettings, arguments, "tandem serve coordinator")
        if settings.workers == 1:
            uvloop.run(serve_to_the_end(settings, CoordinatorService(settings)))
        from coordinator.workers.supervisor import Supervisor

        sys.exit(uvloop.run(Supervisor(settings, arguments).run()))


if __name__ == "__main__":
    run(sys.argv[1:])
