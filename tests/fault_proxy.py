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
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def accept(self, listener: socket.socket) -> None:
        """Serve the connection that has come."""
        connection, _ = listener.accept()
        task = asyncio.create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all connections."""
        await asyncio.sleep(0)  # a task that is cancelled before it begins would leave its socket open
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, connection: socket.socket) -> None:
        """One connection, both ways, until either side ends it."""
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            host, _, port = self.target.rpartition(":")
            there_reader, there_writer = await asyncio.open_connection(host, int(port))
            try:
                await self._join(reader, writer, there_reader, there_writer)
            finally:
                there_writer.transport.abort()
        except OSError:
            pass  # nobody is there
        finally:
            writer.transport.abort()

    async def _join(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        there_reader: asyncio.StreamReader,
        there_writer: asyncio.StreamWriter,
    ) -> None:
        ways = [
            asyncio.create_task(self._pass_on(reader, there_writer, None)),
            asyncio.create_task(self._pass_on(there_reader, writer, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

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
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        proxy = FaultProxy(target, address=f"127.0.0.1:{listener.getsockname()[1]}")
        # asyncio's own servers leave a socket open that arrives while they are being closed.
        loop.add_reader(listener, proxy.accept, listener)
        try:
            yield proxy
        finally:
            loop.remove_reader(listener)
            await proxy.close()
