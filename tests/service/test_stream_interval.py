"""`stream_interval`: fewer and larger chunks over gRPC and HTTP, which say the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.admin_client import AdminClient
from tandem.types import Chunk, GenerationRequest
from tests.service.fakes import FakeTarget, cluster
from tests.service.http_cluster import http_cluster

INTERVAL = 8
COUNT = 20
REQUEST = GenerationRequest((10,), max_tokens=COUNT, temperature=0.0)


async def chunks_over_grpc(request: GenerationRequest = REQUEST, **options: Any) -> list[Chunk]:
    """The chunks of a target that makes one token in a round."""
    async with cluster(FakeTarget(), **options) as client:
        return [chunk async for chunk in client.generate(request)]


async def pieces_over_http(**options: Any) -> list[dict[str, Any]]:
    body = {"model": "fake", "prompt": [10], "max_tokens": COUNT, "temperature": 0, "stream": True,
            "return_token_ids": True, "logprobs": 1}  # fmt: skip
    async with http_cluster(FakeTarget(), **options) as cluster:
        answer = await cluster.http.post("/v1/completions", json=body)
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event)["choices"][0] for event in events[:-1]]


async def test_grpc_gets_the_same_tokens_and_text_in_fewer_chunks() -> None:
    each, joined = await chunks_over_grpc(), await chunks_over_grpc(stream_interval=INTERVAL)
    assert [len(chunk.token_ids) for chunk in each] == [1] * COUNT
    assert [len(chunk.token_ids) for chunk in joined] == [1, INTERVAL, INTERVAL, 3]
    for name in ("text", "token_ids", "drafted", "text_lengths"):
        in_each, in_joined = (
            [part for chunk in chunks for part in getattr(chunk, name)] for chunks in (each, joined)
        )
        assert in_joined == in_each
    assert [i for chunk in joined for i in chunk.token_ids] == [*range(11, 11 + COUNT)]
    summary = joined[-1].summary
    assert summary is not None
    assert summary.speculation.rounds == COUNT


async def test_sse_gets_the_same_tokens_text_and_logprobs_in_fewer_events() -> None:
    each, joined = await pieces_over_http(), await pieces_over_http(stream_interval=INTERVAL)
    assert len(joined) < len(each) / 3
    assert "".join(piece["text"] for piece in joined) == "".join(piece["text"] for piece in each)
    for name in ("token_ids", "drafted"):
        in_each, in_joined = ([part for piece in pieces for part in piece[name]] for pieces in (each, joined))
        assert in_joined == in_each
    for name in ("token_logprobs", "text_offset"):
        in_each, in_joined = (
            [part for piece in pieces if piece["logprobs"] for part in piece["logprobs"][name]]
            for pieces in (each, joined)
        )
        assert in_joined == in_each
    assert joined[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("stop", ["stop_token", "stop_string"])
async def test_an_early_end_is_sent_at_once(stop: str) -> None:
    request = (
        GenerationRequest((10,), max_tokens=COUNT, temperature=0.0, stop_token_ids=(14,))
        if stop == "stop_token"
        else GenerationRequest((10,), max_tokens=4, temperature=0.0, stop=("no such text",))
    )
    chunks = await chunks_over_grpc(request, stream_interval=1000)
    assert [chunk.token_ids for chunk in chunks] == [(11,), (12, 13, 14)]
    assert chunks[-1].summary is not None


async def test_it_can_change_while_the_coordinator_runs() -> None:
    async with cluster(FakeTarget()) as client:
        assert len([chunk async for chunk in client.generate(REQUEST)]) == COUNT
        async with AdminClient(client.address) as admin:
            await admin.update_config({"stream_interval": str(INTERVAL)})
        assert len([chunk async for chunk in client.generate(REQUEST)]) == 4
