"""`python -m bound_service`: start a target service with a draft beside it."""

from __future__ import annotations

import sys
from functools import partial

from bound_service.service import BoundService
from tandem.serving.server import main
from target_service.settings import TargetSettings

run = partial(main, TargetSettings, BoundService, "tandem serve target")
"""Start the service with command-line arguments, and serve until a signal ends it."""

if __name__ == "__main__":
    run(sys.argv[1:])
