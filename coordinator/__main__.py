"""`python -m coordinator`: start the coordinator."""

from __future__ import annotations

import sys

from coordinator.service import CoordinatorService
from coordinator.settings.coordinator import CoordinatorSettings
from tandem.serving.server import main


def run(arguments: list[str]) -> None:
    """Start the coordinator with these command-line arguments, and serve until a signal ends it."""
    main(CoordinatorSettings, CoordinatorService, "tandem serve coordinator", arguments)


if __name__ == "__main__":
    run(sys.argv[1:])
