"""`python -m tandem_target`: start a target service."""

from __future__ import annotations

import sys
from functools import partial

from tandem.serving.server import main
from tandem_target.service import TargetService
from tandem_target.settings import TargetSettings

run = partial(main, TargetSettings, TargetService, "tandem serve target")
"""Start the service with command-line arguments, and serve until a signal ends it."""

if __name__ == "__main__":
    run(sys.argv[1:])
