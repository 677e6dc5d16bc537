"""A load over HTTP, against a scripted server that answers what a test says, byte by byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from benchmarks.load.clients import http_connection, origin_of, served_model
from benchmarks.load.figures import Arrival, Served
from benchmarks.load.generator import send
from tandem.errors import NotFoundError, ProtocolError, ServiceUnavailableError

Answer = Callable[[str, Any], Sequence[bytes]]
"""From a path and a body (None without one) to the pieces of an answer, each written by itself."""


def events(*objects: object, done: bool = True) -> bytes:
    """Server-sent events."""
    ends = b"data: [DONE]\n\n" if done else b""
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in objects) + ends


def text(content: str, usage: dict[str, int] | None = None) -> dict[str, Any]:
    """A chunk of a completion."""
    return {"choices": [{"index": 0, "text": content}], "usage": usage}


def usage(tokens: int) -> dict[str, Any]:
    """The chunk that `stream_options.include_usage` asks for."""
    return {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}}


def answered(status: str, content: bytes, *more: str) -> list[bytes]:
    """An answer with a length."""
    head = [f"HTTP/1.1 {status}", f"content-length: {len(content)}", *more, "", ""]
    return ["\r\n".join(head).encode() + content]


def chunked(*pieces: bytes) -> list[bytes]:
    """An answer in chunks."""
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n"
    chunks = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces]
    return [head, *chunks, b"0\r\n\r\n"]


class OpenAiServer:
    """Its address, and what it was asked."""

    def __init__(self, answer: Answer) -> None:
        self.url = ""
        self.connections = 0
        self.asked: list[tuple[str, dict[str, str], Any]] = []
        """Path, headers and body of each request."""
        self._answer = answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection; an answer with `connection: close` ends it."""
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().strip().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                content = await reader.readexactly(int(headers.get("content-length", 0)))
                body = json.loads(content) if content else None
                path = first.split()[1]
                self.asked.append((path, headers, body))
                pieces = self._answer(path, body)
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.001)
                if b"connection: close" in pieces[0]:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def openai_server(answer: Answer) -> AsyncIterator[OpenAiServer]:
    """Serve on a free port."""
    ran = OpenAiServer(answer)
    server = await asyncio.start_server(ran.serve, "127.0.0.1", 0)
    ran.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield ran
    finally:
        server.close()


WANTED = [Arrival(0.0, 3, 8), Arrival(0.0, 5, 6)]
WITH_USAGE = chunked(events(text("a"), text("bc"), text(""), usage(8)))


async def load(answer: Answer, clients: int = 1, token: str = "") -> tuple[list[Served], OpenAiServer]:
    async with openai_server(answer) as server:
        connect = partial(http_connection, origin_of(server.url), "some", token)
        return await send(connect, WANTED, clients, 0.5, is_paced=False), server


def always(*pieces: bytes) -> Answer:
    return lambda path, body: pieces


@pytest.mark.parametrize(
    ("url", "spelled"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("https://host/proxy/v1", "https://host/proxy"),
        ("http://[::1]:5", "http://[::1]:5"),
    ],
)
def test_a_url_is_taken_with_or_without_its_version(url: str, spelled: str) -> None:
    assert origin_of(url) == spelled


async def test_tokens_are_those_of_the_usage_and_chunks_those_with_text() -> None:
    found, server = await load(always(*WITH_USAGE))
    assert [(served.output_tokens, len(served.chunks), served.error) for served in found] == [(8, 2, "")] * 2
    assert all(served.ended >= served.chunks[-1] >= served.chunks[0] >= served.arrived for served in found)
    assert server.connections == 1, "a client keeps its connection"
    path, headers, body = server.asked[0]
    assert path == "/v1/completions"
    assert headers["host"] == server.url.removeprefix("http://")
    assert "authorization" not in headers
    assert body == {
        "model": "some",
        "prompt": [300, 301, 302],
        "max_tokens": 8,
        "temperature": 0.5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_events_are_read_wherever_the_bytes_are_cut() -> None:
    content = b": a comment\n\n" + events(text("é"), text("b"), usage(7)).replace(b"\n\n", b"\r\n\r\n")
    found, _ = await load(always(*chunked(*(content[i : i + 1] for i in range(len(content))))))
    assert [(served.output_tokens, len(served.chunks)) for served in found] == [(7, 2)] * 2


@pytest.mark.parametrize("more", ["connection: close", "x-other: 1"])
async def test_a_connection_that_the_server_closes_is_opened_again(more: str) -> None:
    found, server = await load(always(*answered("200 OK", events(text("a"), usage(4)), more)))
    assert [served.output_tokens for served in found] == [4, 4]
    assert server.connections == (2 if "close" in more else 1)


async def test_each_client_has_a_connection_and_shows_its_token() -> None:
    _, server = await load(always(*WITH_USAGE), clients=2, token="secret")
    assert server.connections == 2
    assert {headers["authorization"] for _, headers, _ in server.asked} == {"Bearer secret"}


REFUSED = json.dumps({"error": {"message": "no such field: ignore_eos"}}).encode()


@pytest.mark.parametrize(
    ("pieces", "error", "reason"),
    [
        (answered("400 Bad Request", REFUSED), "InvalidRequestError", "answered 400: no such field: ignore_eos"),
        (answered("429 Too Many Requests", b"{}"), "CapacityError", "answered 429: {}"),
        (answered("500 Internal Server Error", b"oh"), "TandemError", "answered 500: oh"),
        (answered("503 Service Unavailable", b""), "ServiceUnavailableError", "answered 503"),
        (
            chunked(events(text("a")), events({"error": {"message": "it broke"}}, done=False)),
            "TandemError",
            "ended a completion: it broke",
        ),
        (chunked(b"data: {]\n\n"), "ProtocolError", "an event of a completion is no JSON object"),
        ([*chunked(events(text("a")))[:-1], b"none\r\n"], "ProtocolError", "does not speak HTTP/1.1"),
        ([b"SSH-2.0-OpenSSH_9\r\n\r\n"], "ProtocolError", "does not speak HTTP/1.1"),
    ],
)  # fmt: skip
async def test_failures_are_counted_by_kind_and_the_load_goes_on(
    pieces: Sequence[bytes], error: str, reason: str
) -> None:
    def first_fails(path: str, body: Any) -> Sequence[bytes]:
        return pieces if len(body["prompt"]) == 3 else WITH_USAGE

    found, _ = await load(first_fails)
    assert [served.error for served in found] == [error, ""]
    assert reason in found[0].reason


async def test_a_server_without_models_is_explained() -> None:
    async with openai_server(always(*answered("200 OK", b'{"data": []}'))) as server:
        with pytest.raises(ProtocolError, match="lists no model; name one with --model"):
            await served_model(origin_of(server.url))
    async with openai_server(always(*answered("404 Not Found", b"nothing here"))) as server:
        with pytest.raises(NotFoundError, match="answered 404: nothing here"):
            await served_model(origin_of(server.url))
    with pytest.raises(ServiceUnavailableError, match=r"cannot connect to http://127\.0\.0\.1:1"):
        await served_model(origin_of("http://127.0.0.1:1"))
