"""`python -m target_service`: start a target service."""

from __future__ import annotations

import sys

from tandem.serving.server import main
from target_service.service import TargetService
from target_service.settings import TargetSettings


def run(arguments: list[str]) -> None:
    """Start the service with these command-line arguments, and serve until a signal ends it."""
    main(TargetSettings, TargetService, arguments, "tandem serve target")


if __name__ == "__main__":
    run(sys.argv[1:])
