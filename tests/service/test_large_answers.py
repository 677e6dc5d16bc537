"""The memory of unstreamed answers and slow bodies is bounded over all connections together."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.http import answers as logprobs
from tests.service.clients import until
from tests.service.fakes import FakeTarget
from tests.service.http_cluster import HttpCluster, http_cluster

SECONDS = 60.0
CHOICES, TOKENS, TOPS = 16, 24, 20
LARGE = {"max_tokens": TOKENS, "n": CHOICES, "temperature": 0, "return_token_ids": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [10], "logprobs": TOPS} | LARGE,
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "a"}],
        "logprobs": True,
        "top_logprobs": TOPS,
    }
    | LARGE,
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
    token_text = logprobs.token_text
    async with http_cluster(FakeTarget(), chat_template=template) as cluster:
        ticker = Ticker()

        def counted(*arguments: Any) -> str:
            rendered[ticker.turns] += 1
            return token_text(*arguments)

        monkeypatch.setattr(logprobs, "token_text", counted)
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
    content = json.dumps(BODIES[path]).encode()
    options: dict[str, Any] = {"http_max_held_answer_bytes": 1 << 20, "chat_template": template}
    async with http_cluster(FakeTarget(), **options) as cluster:
        alone = len((await cluster.http.post(path, json=BODIES[path])).content)
        fit = (1 << 20) // (alone - (64 << 10))
        assert 1 <= fit < 6
        with ExitStack() as stack:
            connections = [stack.enter_context(unread(cluster, path, content)) for _ in range(8)]
            statuses = Counter([await status_of(connection) for connection in connections])
            assert set(statuses) == {200, 429}
            assert statuses[200] <= fit
            refused = await cluster.http.post(path, json=BODIES[path])
            assert refused.status_code == 429
            assert refused.json()["error"]["message"] == (
                "large answers that are not streamed hold 1048576 bytes, which is the maximum; set stream, ask "
                "for fewer completions, tokens or logprobs, or try again"
            )
            assert refused.headers["retry-after"] == "1"
            assert (await cluster.http.post("/v1/completions", json=SMALL)).status_code == 200
            streamed = await cluster.http.post(path, json=BODIES[path] | {"stream": True})
            assert streamed.status_code == 200
        await until(lambda: not cluster.service.completions.admission.running)
        assert (await cluster.http.post(path, json=BODIES[path])).status_code == 200


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


JSON = {"content-type": "application/json"}
