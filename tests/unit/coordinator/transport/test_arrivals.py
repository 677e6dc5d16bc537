"""A wait ends with an arrival or at its limit, and a thousand short waits share one timer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from coordinator.transport.draft_client import Arrivals

LONG = 60.0


def later(seconds: float) -> float:
    return time.monotonic() + seconds


async def test_an_arrival_ends_the_wait() -> None:
    arrivals = Arrivals()
    waiting = asyncio.ensure_future(arrivals.next(later(LONG)))
    await asyncio.sleep(0)
    assert not waiting.done()
    arrivals.notify()
    await asyncio.wait_for(waiting, LONG)
    arrivals.close()


async def test_the_limit_ends_the_wait_and_not_before() -> None:
    arrivals, until = Arrivals(), later(0.05)
    await asyncio.wait_for(arrivals.next(until), LONG)
    assert time.monotonic() >= until
    arrivals.close()


@pytest.mark.parametrize("limits", [(LONG, 0.03), (0.03, 0.06)])
async def test_a_wait_keeps_its_own_limit_beside_the_timer_of_an_earlier_one(
    limits: tuple[float, float],
) -> None:
    arrivals = Arrivals()
    first = asyncio.ensure_future(arrivals.next(later(limits[0])))
    await asyncio.sleep(0)
    arrivals.notify()
    await first
    until = later(limits[1])
    await asyncio.wait_for(arrivals.next(until), LONG / 2)
    assert time.monotonic() >= until
    arrivals.close()


async def test_waits_that_end_early_share_a_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, arrivals, timers = asyncio.get_running_loop(), Arrivals(), 0
    call_later = loop.call_later

    def counted(*arguments: Any, **options: Any) -> asyncio.TimerHandle:
        nonlocal timers
        timers += 1
        return call_later(*arguments, **options)

    monkeypatch.setattr(loop, "call_later", counted)
    for _ in range(1000):
        waiting = asyncio.ensure_future(arrivals.next(later(LONG)))
        await asyncio.sleep(0)
        arrivals.notify()
        await waiting
    assert timers == 1
    arrivals.close()


async def test_an_arrival_that_nobody_waits_for_is_no_error() -> None:
    arrivals = Arrivals()
    arrivals.notify()
    arrivals.close()
