"""One client can take only so much: oversized requests are refused before anything is allocated for them, and the
memory of unstreamed answers and slow bodies is bounded over all connections together.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tandem.clients.client import Client
from tandem.errors import CapacityError, InvalidRequestError
from tandem.model.types import GenerationRequest
from tandem.rpc.credentials import Credentials
from tandem.v1 import generation_pb2
from tandem.wire.status import retry_after_seconds
from tandem_coordinator import servicer
from tandem_coordinator.decoding.tokenization import PromptEncoder, TokenTexts
from tandem_coordinator.requests.admission import LARGE_BYTES
from tandem_coordinator.telemetry.observer import Choices, Observer, RequestObserver
from tests.service.clients import complete, until
from tests.service.fakes import MAX_LENGTH, FakeTarget, cluster, coordinator, paced, served, settings_over
from tests.service.http_cluster import HttpCluster, http_cluster

JSON = {"content-type": "application/json"}
SECONDS = 60.0
TOKEN = "sesame-open-yourself"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("path", "content", "expected"),
    [
        ("completions", b'{"prompt": [' + b'"a",' * 800_000 + b'"a"]}', "values or more"),
        ("completions", b'{"prompt": [' + b"1," * 800_000 + b"1]}", "values or more"),
        ("completions", b'{"prompt": [' + b"{}," * 200_000 + b"{}]}", "lists, objects and fields or more"),
        ("completions", b'{"prompt": "' + b"," * 200_000 + b'"}', "the prompt has 200000 bytes"),
        ("chat/completions", b'{"messages": [' + b"{}," * 130_000 + b"{}]}", "lists, objects and fields or more"),
        ("chat/completions", b'{"messages": [' + b"1," * 2_100 + b"1]}", "messages.0 is 1"),
        ("chat/completions", b'{"messages": [' + b",".join([b'{"role":"user"}'] * 2_049) + b"]}",
            "list should have at most 2048 items"),
    ],
)  # fmt: skip
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
        method: Any = channel.unary_stream(servicer.GENERATE)
        call = method(content, timeout=SECONDS)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            [answer async for answer in call]
        return refusal.value.code(), refusal.value.details() or ""


async def test_large_messages_are_bounded_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(FakeTarget()) as client:
        ids = generation_pb2.GenerateRequest(stop=["a"] * 1_000_000, text="a").SerializeToString()
        texts = (16 + 256) * 1029  # stop strings and bad words
        most = 32 * MAX_LENGTH + texts + 1024 * (16 + 5) + (64 << 10) + 256 * 5 + 4096
        assert await refused(client.address, ids) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the request has {len(ids)} bytes; it must be at most {most}",
        )
        monkeypatch.setattr(servicer, "max_bytes", lambda *_: 1 << 20)
        code, expected = await refused(
            client.address, generation_pb2.GenerateRequest(stop=["a"] * 100_000, text="a").SerializeToString()
        )
        assert (code, expected) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "stop has 100000 strings; it must be at most 16",
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
        method: Any = channel.unary_stream(servicer.GENERATE)
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


@dataclass
class Counts(Observer, RequestObserver):
    """Records requests and their outcomes."""

    begun: list[str] = field(default_factory=list)
    """The trace context of each."""
    outcomes: list[BaseException | None] = field(default_factory=list)

    def begin(self, request_id: str, traceparent: str = "", choices: Choices | None = None) -> Counts:
        self.begun.append(traceparent)
        return self

    def finished(self, error: BaseException | None) -> None:
        self.outcomes.append(error)


async def test_a_full_coordinator_refuses_a_request_unread_once_it_has_seen_the_token() -> None:
    """It counts it too. Without the token nobody learns of its load."""
    target = paced(2 * SECONDS)
    counter = Counts()
    bounds = {"max_concurrent_requests": 1, "max_queued_requests": 0}
    async with (
        served(target) as services,
        coordinator(settings_over(services, **bounds), counter, TOKEN) as (address, service),
        Client(address, Credentials(token=TOKEN)) as client,
        grpc.aio.insecure_channel(address) as channel,
    ):
        runs = asyncio.create_task(complete(client, GenerationRequest((10,), max_tokens=5)))
        await until(service.completions.admission.refuses)
        method: Any = channel.stream_stream(servicer.GENERATE)
        # Calls whose message is never sent
        unknown = method(timeout=SECONDS)
        assert await unknown.code() is grpc.StatusCode.UNAUTHENTICATED
        call = method(
            metadata=(("authorization", f"Bearer {TOKEN}"), ("traceparent", TRACE)), timeout=SECONDS
        )
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await call.details() == "1 request runs and 0 wait, which is the most; try again later"
        assert (retry_after_seconds(await call.trailing_metadata()) or 0.0) > 0.0
        assert counter.begun == ["", TRACE]
        (error,) = counter.outcomes
        assert isinstance(error, CapacityError)
        runs.cancel()
        await asyncio.gather(runs, return_exceptions=True)


CHOICES = 16
TOKENS = 24
TOPS = 20
LARGE = {"max_tokens": TOKENS, "n": CHOICES, "temperature": 0, "return_token_ids": True}
MESSAGES = [{"role": "user", "content": "a"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [10], "logprobs": TOPS} | LARGE,
    "/v1/chat/completions": {"messages": MESSAGES, "logprobs": True, "top_logprobs": TOPS} | LARGE,
}
SMALL = {"prompt": [10], "max_tokens": 4, "temperature": 0}


class Ticker:
    """Counts the turns of the event loop."""

    def __init__(self) -> None:
        self.turns = 0
        self._loop = asyncio.get_running_loop()
        self._tick()

    def _tick(self) -> None:
        self.turns += 1
        self._handle = self._loop.call_soon(self._tick)

    def stop(self) -> None:
        self._handle.cancel()


@pytest.mark.parametrize("path", BODIES)
async def test_the_event_loop_runs_while_a_large_answer_is_built(
    path: str, template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each turn of the event loop renders at most one chunk of one completion."""
    rendered: Counter[int] = Counter()
    text_of = TokenTexts.text
    async with http_cluster(FakeTarget(), chat_template=template) as cluster:
        ticker = Ticker()

        def counted(texts: TokenTexts, token_id: int) -> str:
            rendered[ticker.turns] += 1
            return text_of(texts, token_id)

        monkeypatch.setattr(TokenTexts, "text", counted)
        answer = await cluster.http.post(path, json=BODIES[path])
        ticker.stop()
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert [len(choice["token_ids"]) for choice in choices] == [TOKENS] * CHOICES
    assert rendered.total() >= CHOICES * TOKENS * TOPS
    assert max(rendered.values()) <= 2 * (TOPS + 1), "the whole answer was rendered in one turn"


@pytest.mark.parametrize("path", BODIES)
async def test_a_whole_answer_equals_the_streamed_one(path: str, template: Path) -> None:
    body = BODIES[path] | {"n": 1}
    async with http_cluster(FakeTarget(), chat_template=template) as cluster:
        whole = await cluster.http.post(path, json=body)
        streamed = await cluster.http.post(path, json=body | {"stream": True})
    assert int(whole.headers["content-length"]) == len(whole.content)
    (choice,) = whole.json()["choices"]
    lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: {")]
    pieces = [json.loads(line)["choices"][0] for line in lines]
    expected: dict[str, Any] = {
        name: [item for piece in pieces for item in piece[name]]
        for name in ("token_ids", "drafted", "text_lengths", "proposed", "drafted_ahead")
    }
    if path == "/v1/completions":
        expected["text"] = "".join(piece["text"] for piece in pieces)
        expected["logprobs"] = {
            name: [item for piece in pieces if piece["logprobs"] for item in piece["logprobs"][name]]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
    else:
        content = "".join(piece["delta"]["content"] for piece in pieces)
        expected["message"] = {"role": "assistant", "content": content, "refusal": None}
        entries = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]]
        expected["logprobs"] = {"content": entries, "refusal": None}
    assert {name: choice[name] for name in expected} == expected
    assert choice["finish_reason"] == pieces[-1]["finish_reason"] == "length"


@contextmanager
def unread(cluster: HttpCluster, path: str, body: bytes, left_out: int = 0) -> Iterator[socket.socket]:
    """Open a connection, send a request without its last bytes, and read nothing."""
    host, _, port = cluster.url.rpartition("/")[2].rpartition(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        content = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        connection.sendall(content[: len(content) - left_out])
        connection.setblocking(False)
        yield connection


async def status_of(connection: socket.socket) -> int:
    async with asyncio.timeout(SECONDS):
        first = await asyncio.get_running_loop().sock_recv(connection, 64)
    return int(first.split()[1])


async def test_the_memory_of_large_answers_is_bounded(template: Path) -> None:
    """Clients read nothing: some answers wait for them, further large ones are refused, small ones are not."""
    path = "/v1/chat/completions"
    body = BODIES[path] | {"n": CHOICES // 2}
    content = json.dumps(body).encode()
    options: dict[str, Any] = {"http_max_held_answer_bytes": 1 << 19, "chat_template": template}
    async with http_cluster(FakeTarget(), **options) as cluster:
        alone = len((await cluster.http.post(path, json=body)).content)
        fit = (1 << 19) // (alone - (64 << 10))
        assert 1 <= fit < 5
        with ExitStack() as stack:
            connections = [stack.enter_context(unread(cluster, path, content)) for _ in range(5)]
            statuses = Counter([await status_of(connection) for connection in connections])
            assert set(statuses) == {200, 429}
            assert statuses[200] <= fit
            refused = await cluster.http.post(path, json=body)
            assert refused.status_code == 429
            assert refused.json()["error"]["message"] == (
                "large answers that are not streamed hold 524288 bytes, which is the maximum; set stream, ask "
                "for fewer completions, tokens or logprobs, or try again"
            )
            assert refused.headers["retry-after"] == "1"
            assert (await cluster.http.post("/v1/completions", json=SMALL)).status_code == 200
            streamed = await cluster.http.post(path, json=body | {"stream": True})
            assert streamed.status_code == 200
        await until(lambda: not cluster.service.completions.admission.running)
        assert (await cluster.http.post(path, json=body)).status_code == 200


async def test_the_memory_of_bodies_is_bounded() -> None:
    """64 clients send a large body without its end: most are refused, and a small request is answered meanwhile."""
    body = json.dumps({"prompt": "a" * (1 << 20)}).encode()
    options: dict[str, Any] = {"http_max_body_bytes": 2 << 20, "http_max_held_body_bytes": 8 << 20}
    async with http_cluster(FakeTarget(), **options) as cluster:
        with ExitStack() as stack:
            connections = [
                await asyncio.to_thread(stack.enter_context, unread(cluster, "/v1/completions", body, 1))
                for _ in range(64)
            ]
            assert (await cluster.http.post("/v1/completions", json=SMALL)).status_code == 200
            refused = await cluster.http.post("/v1/completions", content=body, headers=JSON)
            assert refused.status_code == 429
            assert refused.json()["error"]["message"] == (
                "large bodies that have not arrived completely hold 8388608 bytes, which is the maximum; try again"
            )
            for connection in connections:
                await asyncio.get_running_loop().sock_sendall(connection, body[-1:])
            statuses = Counter([await status_of(connection) for connection in connections])
            # Accepted bodies are then refused for their text.
            assert set(statuses) == {400, 429}
            assert 4 <= statuses[400] <= 8
        taken = await cluster.http.post("/v1/completions", content=body, headers=JSON)
        assert taken.status_code == 400
