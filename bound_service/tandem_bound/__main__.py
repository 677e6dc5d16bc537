"""`python -m tandem_bound`: start a target service with a draft beside it."""

from __future__ import annotations

import sys
from functools import partial

from tandem.serving.server import main
from tandem_bound.service import BoundService
from tandem_target.settings import TargetSettings

run = partial(main, TargetSettings, BoundService, "tandem serve target")
"""Start the service with command-line arguments, and serve until a signal ends it."""

if __name__ == "__main__":
    run(sys.argv[1:])
