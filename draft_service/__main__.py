"""`python -m draft_service`: start a draft service."""

from __future__ import annotations

import sys
from functools import partial

from draft_service.service import DraftService
from draft_service.settings import DraftSettings
from tandem.serving.server import main

run = partial(main, DraftSettings, DraftService, "tandem serve draft")
"""Start the service with command-line arguments, and serve until a signal ends it."""

if __name__ == "__main__":
    run(sys.argv[1:])
