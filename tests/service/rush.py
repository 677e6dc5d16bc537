"""Sends many requests in one write, at almost no processor time.

A `grpc.aio` client takes as long for a call as the coordinator takes to refuse it: eighty of them in one process would
measure themselves.
"""

from __future__ import annotations

import asyncio
import base64
import struct
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event, ResponseReceived, StreamEnded, StreamReset, TrailersReceived

_LARGEST_READ = 1 << 20
_PREFIX = struct.Struct("!?I")
"""The prefix of a gRPC message: a flag for compression, and the length."""


@dataclass
class Answer:
    """The answer to a request."""

    seconds: float | None = None
    """Time from the write to the end of the answer; None until then."""
    headers: dict[str, str] = field(default_factory=dict)
    content: bytes = b""

    @property
    def code(self) -> int:
        """The gRPC status code."""
        return int(self.headers["grpc-status"])

    @property
    def trailing_metadata(self) -> list[tuple[str, bytes]]:
        """The binary trailing metadata."""
        return [
            (name, base64.b64decode(value + "=" * (-len(value) % 4)))
            for name, value in self.headers.items()
            if name.endswith("-bin")
        ]

    @property
    def messages(self) -> Iterator[bytes]:
        """The messages of the response stream."""
        content = self.content
        while content:
            _, length = _PREFIX.unpack_from(content)
            yield content[_PREFIX.size : _PREFIX.size + length]
            content = content[_PREFIX.size + length :]


class Rush:
    """A connection to a gRPC server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = H2Connection(H2Configuration(header_encoding="utf-8"))
        self._http.initiate_connection()
        self._answers: dict[int, Answer] = {}

    async def ask(self, method: str, message: bytes, count: int) -> list[Answer]:
        """Send the request this many times at once, and wait for all answers."""
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": "localhost",
            "te": "trailers",
            "content-type": "application/grpc",
        }
        self._answers = {}
        for _ in range(count):
            stream = self._http.get_next_available_stream_id()
            self._http.send_headers(stream, list(headers.items()))
            self._http.send_data(stream, _PREFIX.pack(False, len(message)) + message, end_stream=True)
            self._answers[stream] = Answer()
        began = time.perf_counter()
        self._writer.write(self._http.data_to_send())
        while any(answer.seconds is None for answer in self._answers.values()):
            content = await self._reader.read(_LARGEST_READ)
            assert content, "the server closed the connection"
            for event in self._http.receive_data(content):
                self._note(event, time.perf_counter() - began)
            self._writer.write(self._http.data_to_send())
        return list(self._answers.values())

    def _note(self, event: Event, seconds: float) -> None:
        match event:
            case ResponseReceived() | TrailersReceived():
                self._answers[event.stream_id].headers |= {str(k): str(v) for k, v in event.headers}
            case DataReceived():
                self._answers[event.stream_id].content += event.data
                self._http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case StreamEnded() if self._answers[event.stream_id].seconds is None:
                self._answers[event.stream_id].seconds = seconds
            case StreamReset() if self._answers[event.stream_id].seconds is None:
                raise AssertionError(f"the server reset a stream: {event.error_code}")
            case _:
                pass


@asynccontextmanager
async def rush(address: str) -> AsyncIterator[Rush]:
    """Connect during the block."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Rush(reader, writer)
    finally:
        writer.close()
