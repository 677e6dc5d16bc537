"""The load generator over HTTP before a coordinator: what it counts is what the coordinator generated."""

from __future__ import annotations

from functools import partial

from benchmarks.load.clients import http_connection, origin_of, served_model
from benchmarks.load.figures import Arrival
from benchmarks.load.generator import send
from tests.service.fakes import FakeDraft, FakeTarget
from tests.service.http_cluster import http_cluster

WANTED = [Arrival(0.0, 5, 12), Arrival(0.0, 4, 7), Arrival(0.0, 6, 9)]


async def test_tokens_and_chunks_of_a_coordinator_are_counted() -> None:
    async with http_cluster(FakeTarget(), FakeDraft()) as cluster:
        origin = origin_of(cluster.url)
        connect = partial(http_connection, origin, await served_model(origin))
        found = await send(connect, WANTED, 2, 0.0, is_paced=False)
    assert [served.error for served in found] == [""] * 3
    assert [served.output_tokens for served in found] == [12, 7, 9]
    assert all(1 < len(served.chunks) < served.output_tokens for served in found), "a chunk for each round"


async def test_what_the_coordinator_refuses_is_a_failure_with_its_sentence() -> None:
    async with http_cluster(FakeTarget()) as cluster:
        connect = partial(http_connection, origin_of(cluster.url), "another-model")
        found = await send(connect, WANTED[:1], 1, 0.0, is_paced=False)
    assert found[0].error == "NotFoundError"
    assert "another-model" in found[0].reason
