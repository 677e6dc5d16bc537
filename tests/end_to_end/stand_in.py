"""`tandem up` with services that start at once.

Each service is this module, without a server: it announces itself, and ends at SIGTERM. STAND_IN changes that: one that
"starts" never announces itself, one that "stays" does not heed SIGTERM. The services import nothing else, and a nursery
forks the command, so that a test can start many.
"""

from __future__ import annotations

import os
import signal
import sys
import time


def tandem(arguments: list[str]) -> None:
    from tandem_coordinator.cli.main import main
    from tandem_coordinator.cli.serve import SERVICES

    SERVICES.update(dict.fromkeys(SERVICES, __name__))
    sys.argv = ["tandem", *arguments]
    main()


def stand_in() -> None:
    behaviour = os.environ.get("STAND_IN", "")
    signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "stays" else lambda *_: sys.exit(0))
    if behaviour != "starts":
        sys.stdout.write("listening on 127.0.0.1:1\nhttp on http://127.0.0.1:1\nready on 127.0.0.1:1\n")
        sys.stdout.flush()
    while True:
        time.sleep(60)


if __name__ == "__main__":
    stand_in()
