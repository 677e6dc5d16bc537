"""`python -m tandem_draft`: start a draft service."""

from __future__ import annotations

import sys
from functools import partial

from tandem.serving.server import main
from tandem_draft.service import DraftService
from tandem_draft.settings import DraftSettings

run = partial(main, DraftSettings, DraftService, "tandem serve draft")
"""Start the service with command-line arguments, and serve until a signal ends it."""

if __name__ == "__main__":
    run(sys.argv[1:])
