"""`python -m tandem_coordinator`: start the coordinator."""

from __future__ import annotations

import sys

from tandem.serving.server import main
from tandem_coordinator.service import CoordinatorService
from tandem_coordinator.settings.coordinator import CoordinatorSettings


def run(arguments: list[str]) -> None:
    """Start the coordinator with these command-line arguments, and serve until a signal ends it."""
    main(CoordinatorSettings, CoordinatorService, "tandem serve coordinator", arguments)


if __name__ == "__main__":
    run(sys.argv[1:])
