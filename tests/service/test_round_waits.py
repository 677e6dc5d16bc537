"""`measure_waits`: where rounds wait inside the coordinator is counted for every message of a shared stream."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from coordinator.telemetry.metrics import WAIT_PLACES
from tests.service.clients import until
from tests.service.fakes import FakeDraft, FakeTarget
from tests.service.scripted_request import COMPLETION, REQUEST, value
from tests.service.telemetry_cluster import ObservedCluster, observed_cluster

STREAMS = 4
ROUNDS = 3
"""At least, of one request."""


async def complete_some(cluster: ObservedCluster) -> None:
    requests = [replace(REQUEST, seed=seed) for seed in range(STREAMS)]
    found = await asyncio.gather(*map(cluster.complete, requests))
    assert found == [COMPLETION] * STREAMS


async def test_waits_of_answers_and_questions_are_counted() -> None:
    async with observed_cluster(FakeTarget(), FakeDraft(), measure_waits=True) as cluster:
        await complete_some(cluster)

        def count(place: str) -> float:
            return value(cluster.coordinator, "round_wait_seconds_count", place=place) or 0.0

        # One of them may have streams of its own, on which there is nothing to wait for.
        for place in ("answer", "question"):
            assert count(place) >= (STREAMS - 1) * ROUNDS
            seconds = value(cluster.coordinator, "round_wait_seconds_sum", place=place)
            assert seconds is not None
            assert seconds > 0.0
        await until(lambda: count("event_loop") > 0, 30.0)


async def test_nothing_is_measured_unless_asked_for() -> None:
    async with observed_cluster(FakeTarget(), FakeDraft()) as cluster:
        await complete_some(cluster)
        for place in WAIT_PLACES:
            assert value(cluster.coordinator, "round_wait_seconds_count", place=place) is None
