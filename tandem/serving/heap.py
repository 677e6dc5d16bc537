"""Garbage collection of a service: its start is exempt, and young objects are collected in larger lots."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 10_000
"""New objects, less those that were freed, after which the collector looks at them. With Python's default of 700 a
coordinator collects hundreds of times a second and finds nothing, since rounds leave no cycles: a tenth of its time
(docs/benchmarks.md)."""


def set_start_aside() -> None:
    """Exempt all present objects from later collections.

    A service that has imported torch and loaded its model holds some 400,000 objects for its whole life. A full
    collection visits all of them while every request waits: 0.2 to 0.3 s in a target or draft service, 0.03 to 0.05 s
    in a coordinator (docs/benchmarks.md). Present garbage is collected first, since it would stay forever. Later
    collections come more rarely (`YOUNG_OBJECTS`).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
