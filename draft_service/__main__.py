"""`python -m draft_service`: start a draft service."""

from __future__ import annotations

import sys

from draft_service.service import DraftService
from draft_service.settings import DraftSettings
from tandem.serving.server import main


def run(arguments: list[str]) -> None:
    """Start the service with these command-line arguments, and serve until a signal ends it."""
    main(DraftSettings, DraftService, arguments, "tandem serve draft")


if __name__ == "__main__":
    run(sys.argv[1:])
