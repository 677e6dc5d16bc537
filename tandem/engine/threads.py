"""Settings of waiting threads. They must be made before torch is imported, so this module does not import it."""

from __future__ import annotations

import os
import sys

_SPIN_VARIABLE = "GOMP_SPINCOUNT"


def wait_asleep() -> None:
    """Makes idle threads of this process give up their core at once, unless the environment sets it otherwise."""
    # Turns for which an idle OpenMP thread waits awake: microseconds. By default it is about a millisecond, on cores
    # that another service needs. Measured with two threads on two busy cores, a product of 5 rows with 2816 x
    # 1024 weights takes 0.55 ms at the median with this and 12 ms with the default; on idle cores the default
    # saves some 20 us each time.
    os.environ.setdefault(_SPIN_VARIABLE, "1000")


def switch_early() -> None:
    """Lets the engine's thread have the interpreter soon after it asks."""
    # Seconds for which a thread may hold the interpreter while another waits. Python's default is 5
    # ms, as long as a small model's step. The engine's thread needs the interpreter several times in a step, and
    # the event loop, which answers the step before, would hold it for as long as it has work. docs/measurements.md has
    # the measurement.
    sys.setswitchinterval(0.0005)
