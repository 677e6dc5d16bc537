"""The probe of the event loop waits as long as anything else that a thread hands to the loop."""

from __future__ import annotations

import asyncio
import threading
import time

from coordinator.telemetry.setup import EventLoopProbe
from tests.service.clients import until

SECONDS = 30.0


async def test_waits_are_observed_on_the_loop_until_it_is_closed() -> None:
    waits: list[float] = []
    threads: set[int] = set()

    def observe(seconds: float) -> None:
        waits.append(seconds)
        threads.add(threading.get_ident())

    probe = EventLoopProbe(observe, interval_seconds=0.001)
    probe.start()
    await until(lambda: len(waits) >= 3, SECONDS)
    await probe.close()
    await asyncio.sleep(0.005)  # what was handed over before it was closed
    count = len(waits)
    await asyncio.sleep(0.01)
    assert len(waits) == count
    assert min(waits) > 0.0
    assert threads == {threading.get_ident()}


async def test_a_loop_that_is_held_up_is_probed_all_the_while() -> None:
    waits: list[float] = []
    probe = EventLoopProbe(waits.append, interval_seconds=0.001)
    probe.start()
    await until(lambda: len(waits) >= 1, SECONDS)
    count = len(waits)
    time.sleep(0.1)  # noqa: ASYNC251 - it holds up the loop
    assert len(waits) == count
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(waits) > count + 1
    await probe.close()
