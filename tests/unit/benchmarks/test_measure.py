"""Turns of contenders, timers of rounds, the relay that counts bytes, and steps with a minimum time."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from itertools import product
from typing import cast

import pytest

from benchmarks.common import rotated
from benchmarks.pace import Pace
from benchmarks.timing import WatchedRequest, relay
from coordinator.decoding.completion import Completion
from tandem.engine.core.jobs import StepRecord
from tandem.types import Acceptance, NextToken, Proposal, TokenRow, Verification


def test_everyone_runs_once_in_each_round_and_at_each_place_equally_often() -> None:
    names = ["a", "b", "c"]
    rounds = [rotated(names, number) for number in range(6)]

    assert all(sorted(order) == names for order in rounds)
    for name, place in product(names, range(3)):
        assert [order[place] for order in rounds].count(name) == 2


class Slow:
    """Proposes what the round calls for, and verifies, in known times."""

    def __init__(self, *proposals: Proposal) -> None:
        self._proposals = iter(proposals)

    async def propose(self, completion: Completion) -> Proposal:
        await asyncio.sleep(0.02)
        return next(self._proposals)

    async def verify(self, completion: Completion, proposal: Proposal) -> Verification:
        await asyncio.sleep(0.04)
        return Verification(0, (TokenRow(0),))


def accept(proposal: Proposal, verification: Verification) -> Acceptance:
    return Acceptance(0, 1, NextToken.BONUS)


async def test_rounds_with_a_proposal_are_timed_but_for_the_first() -> None:
    some_completion = cast(Completion, None)  # nobody here looks at it
    nothing, something = Proposal(3), Proposal(3, (1, 2))
    slow = Slow(nothing, something, something, nothing, something)
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    watched = WatchedRequest(seconds, slow, slow, accept)

    for _ in range(5):
        proposal = await watched.propose(some_completion)
        watched.accept(proposal, await watched.verify(some_completion, proposal))

    assert {name: len(found) for name, found in seconds.items()} == {
        "draft": 2,
        "verify": 2,
        "sampling": 2,
        "wait": 2,
    }
    assert min(seconds["draft"]) >= 0.019
    assert min(seconds["verify"]) >= 0.039
    assert max(seconds["sampling"]) < min(seconds["verify"])


async def test_everything_is_passed_on_and_counted() -> None:
    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.readexactly(100_000)).upper())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(shout, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    async with relay(f"127.0.0.1:{port}") as between:
        host, _, own_port = between.address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(own_port))
        writer.write(b"a" * 100_000)
        answer = await reader.read(-1)
        writer.close()

    server.close()
    assert answer == b"A" * 100_000
    assert between.byte_count == 200_000


def test_a_step_sleeps_for_what_is_left_of_its_time() -> None:
    pace = Pace.from_text("6.5,1.2,0.1")
    slept: list[float] = []
    seen: list[StepRecord] = []
    wait = pace.paced("target", seen.append, slept.append)
    wait(StepRecord(1, 1, 1, 0.001, 0.0025))
    wait(StepRecord(1, 9, 9, 0.001, 0.0))
    wait(StepRecord(1, 1, 1, 0.1, 0.1))
    assert slept == pytest.approx([0.004, 0.0065 * 1.1])
    assert len(seen) == 3
    assert pace.seconds("draft", 1) == pytest.approx(0.0012)
