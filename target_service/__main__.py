"""`python -m target_service`: start a target service."""

from __future__ import annotations

import sys
from functools import partial

from tandem.serving.server import main
from target_service.service import TargetService
from target_service.settings import TargetSettings

run = partial(main, TargetSettings, TargetService, "tandem serve target")
"""Start the service with command-line arguments, and serve until a signal ends it."""

if __name__ == "__main__":
    run(sys.argv[1:])
