"""A TCP proxy between two parts that delays bytes, breaks connections, or lets them fall silent."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

_CHUNK_BYTES = 16_384


@dataclass
class FaultProxy:
    """Passes bytes on, with the faults that are set at the moment."""

    target: str
    """host:port to pass them on to."""
    delay_seconds: float = 0.0
    """How much later each byte arrives, in both directions."""
    reset_after_bytes: int | None = None
    """Break a connection when so many more bytes have come back, whichever it is; once only."""
    is_silent: bool = False
    """Pass nothing on and say nothing: the connection is half open."""
    address: str = ""
    passed_bytes: int = 0
    """From the target to its callers, over all connections."""
    resets: int = 0
    _silence_ends: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, both ways, until either side ends it."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        host, _, port = self.target.rpartition(":")
        try:
            there_reader, there_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            self._tasks.discard(task)
            return
        ways = [
            asyncio.create_task(self._pass_on(reader, there_writer, None)),
            asyncio.create_task(self._pass_on(there_reader, writer, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            pass  # `close` ends connections so, and asyncio's streams would complain of it
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (writer, there_writer):
                end.transport.abort()
            self._tasks.discard(task)

    async def close(self) -> None:
        """End all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pass_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        to_reset: asyncio.StreamWriter | None,
    ) -> None:
        """One direction. The one back to the caller counts bytes and may break the connection."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def read() -> None:
            with contextlib.suppress(OSError):
                while content := await reader.read(_CHUNK_BYTES):
                    queue.put_nowait((loop.time() + self.delay_seconds, content))
            queue.put_nowait((loop.time() + self.delay_seconds, b""))

        reading = asyncio.create_task(read())
        try:
            with contextlib.suppress(OSError):
                while True:
                    moment, content = await queue.get()
                    await asyncio.sleep(max(0.0, moment - loop.time()))
                    if self.is_silent:
                        await asyncio.Event().wait()
                    if not content:
                        return
                    if to_reset is not None:
                        self.passed_bytes += len(content)
                        if self.reset_after_bytes is not None:
                            if len(content) >= self.reset_after_bytes:
                                writer.write(content[: self.reset_after_bytes])
                                self.reset_after_bytes = None
                                self.resets += 1
                                _reset(to_reset)
                                return
                            self.reset_after_bytes -= len(content)
                    writer.write(content)
                    await writer.drain()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection as a crash does: with a reset in place of a goodbye."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@asynccontextmanager
async def fault_proxy(target: str) -> AsyncIterator[FaultProxy]:
    """A proxy before host:port, without a fault as yet."""
    proxy = FaultProxy(target)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    proxy.address = f"127.0.0.1:{port}"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
        await server.wait_closed()
