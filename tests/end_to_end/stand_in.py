"""`tandem up` with services that start at once: `python -m tests.end_to_end.stand_in up ...`.

Each service is this module too, without a server: it announces itself, and ends at SIGTERM. STAND_IN changes that: one
that "starts" never announces itself, one that "stays" does not heed SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import coordinator.cli.up as up
from coordinator.cli.main import main


def stand_in() -> None:
    behaviour = os.environ.get("STAND_IN", "")
    signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "stays" else lambda *_: sys.exit(0))
    if behaviour != "starts":
        sys.stdout.write("listening on 127.0.0.1:1\nhttp on http://127.0.0.1:1\nready on 127.0.0.1:1\n")
        sys.stdout.flush()
    while True:
        time.sleep(60)


if __name__ == "__main__":
    if sys.argv[1] != "up":
        stand_in()
    vars(up)["package_of"] = lambda service, arguments: __spec__.name
    sys.argv[0] = "tandem"
    main()
