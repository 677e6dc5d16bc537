"""`python -m bound_service`: start a target service with a draft beside it."""

from __future__ import annotations

import sys

from bound_service.service import BoundService
from tandem.serving.server import main
from target_service.settings import TargetSettings


def run(arguments: list[str]) -> None:
    """Start both services with these command-line arguments, and serve until a signal ends them."""
    main(TargetSettings, BoundService, arguments, "tandem serve target")


if __name__ == "__main__":
    run(sys.argv[1:])
