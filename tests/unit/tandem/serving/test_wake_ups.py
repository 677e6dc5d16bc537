"""However many events of gRPC there are, the event loop gets to all of them in one turn."""

from __future__ import annotations

import subprocess
import sys

from tests.paths import ROOT
from tests.unit.tandem.serving.wake_up_counts import CALLS


def test_one_turn_of_the_loop_reads_the_wake_ups_of_many_events() -> None:
    """Left in the socket they fill it, and gRPC's thread stops until most of them were read, one in each turn."""
    command = [sys.executable, "-P", "-m", "tests.unit.tandem.serving.wake_up_counts"]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    assert 1 <= int(ended.stdout.split()[-1]) <= CALLS // 10
