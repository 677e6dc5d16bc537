"""A scripted server of OpenAI's completions: it answers what a test says, byte by byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

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
