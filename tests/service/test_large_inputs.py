"""Oversized requests (many completions, prompts or values) are refused before anything is allocated for them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from coordinator.decoding.tokenization import PromptEncoder
from coordinator.requests import arrival
from coordinator.requests.runner import LARGE_BYTES
from tandem.errors import InvalidRequestError
from tandem.types import GenerationRequest
from tandem.v1 import generation_pb2
from tests.service.fakes import MAX_LENGTH, FakeTarget, cluster
from tests.service.http_cluster import http_cluster

JSON = {"content-type": "application/json"}
SECONDS = 20.0


@pytest.mark.parametrize(
    ("path", "content", "expected"),
    [
        ("completions", b'{"prompt": [' + b'"a",' * 800_000 + b'"a"]}', "values or more"),
        ("completions", b'{"prompt": [' + b"1," * 800_000 + b"1]}", "values or more"),
        ("completions", b'{"prompt": [' + b"{}," * 200_000 + b"{}]}", "lists, objects and fields or more"),
        ("completions", b'{"prompt": "' + b"," * 200_000 + b'"}', "the prompt has 200000 bytes"),
        (
            "chat/completions",
            b'{"messages": [' + b"{}," * 130_000 + b"{}]}",
            "lists, objects and fields or more",
        ),
        ("chat/completions", b'{"messages": [' + b"1," * 2_100 + b"1]}", "messages.0 is 1"),
        (
            "chat/completions",
            b'{"messages": [' + b",".join([b'{"role":"user"}'] * 2_049) + b"]}",
            "list should have at most 2048 items",
        ),
    ],
)
async def test_bodies_of_many_values_are_refused_unparsed(path: str, content: bytes, expected: str) -> None:
    async with http_cluster(FakeTarget()) as cluster:
        answer = await cluster.http.post(f"/v1/{path}", content=content, headers=JSON)
        assert answer.status_code in (400, 413)
        assert expected in answer.json()["error"]["message"]
        assert (await cluster.http.get("/health")).status_code == 200


async def test_a_text_that_cannot_fit_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    async def encode(*_: object, **__: object) -> tuple[int, ...]:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(PromptEncoder, "encode", encode)
    text = "a" * (32 * MAX_LENGTH + 1)
    expected = "the prompt has 2049 bytes; it must be at most 2048, since longer texts have more tokens than max_length"
    async with http_cluster(FakeTarget()) as http, cluster(FakeTarget()) as client:
        answer = await http.http.post("/v1/completions", json={"prompt": text})
        assert answer.json()["error"]["message"].startswith(expected)
        with pytest.raises(InvalidRequestError, match=expected):
            [chunk async for chunk in client.generate(GenerationRequest(text))]


async def refused(address: str, content: bytes) -> tuple[grpc.StatusCode, str]:
    """Send these bytes as a request, and return the refusal."""
    async with grpc.aio.insecure_channel(address) as channel:
        method: Any = channel.unary_stream(arrival.GENERATE)
        call = method(content, timeout=SECONDS)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            [answer async for answer in call]
        return refusal.value.code(), refusal.value.details() or ""


async def test_large_messages_are_bounded_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(FakeTarget()) as client:
        ids = generation_pb2.GenerateRequest(stop=["a"] * 1_000_000, text="a").SerializeToString()
        most = 32 * MAX_LENGTH + 16 * 1029 + 1024 * 16 + (64 << 10) + 256 * 5 + 4096
        assert await refused(client.address, ids) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the request has {len(ids)} bytes; it must be at most {most}",
        )
        monkeypatch.setattr(arrival, "max_bytes", lambda *_: 1 << 20)
        code, expected = await refused(
            client.address, generation_pb2.GenerateRequest(stop=["a"] * 100_000, text="a").SerializeToString()
        )
        assert (code, expected) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "the number of stop strings is 100000; it must be at most 16",
        )
        message = generation_pb2.GenerateRequest()
        message.token_ids.token_ids.extend([1] * 100_000)
        code, expected = await refused(client.address, message.SerializeToString())
        assert expected.startswith("the prompt has 100000 tokens; it must have at most 63")
        code, expected = await refused(client.address, b"\xff" * (LARGE_BYTES + 1))
        assert (code, expected) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "a message cannot be read; its bytes must be the protobuf that the method takes",
        )


async def test_a_large_request_within_the_bounds_is_answered() -> None:
    # Unknown fields are skipped, so a large message may be a small request.
    content = generation_pb2.GenerateRequest(text="a", max_tokens=2).SerializeToString()
    unknown = b"\xfa\xff\x01" + b"\x80\x90\x01" + bytes(18 << 10)
    async with cluster(FakeTarget()) as client, grpc.aio.insecure_channel(client.address) as channel:
        method: Any = channel.unary_stream(arrival.GENERATE)
        call = method(content + unknown, timeout=SECONDS)
        answers = [generation_pb2.GenerateResponse.FromString(answer) async for answer in call]
    assert answers[-1].summary.completion_token_count == 2


async def test_a_request_with_two_content_lengths_closes_its_connection() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    smuggled = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
    async with http_cluster(FakeTarget()) as cluster:
        port = int(cluster.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + smuggled)
        async with asyncio.timeout(SECONDS):
            expected = await reader.read()
        writer.close()
    assert expected.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in expected.lower()
    assert expected.count(b"HTTP/1.1 ") == 1
