"""Counts the bytes of a connection by standing in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_CHUNK_BYTES = 1 << 16


class Relay:
    """Forwards everything in both directions."""

    def __init__(self, host: str, port: int, one_way_seconds: float = 0.0) -> None:
        """
        Args:
            host: Of the server.
            port: Of the server.
            one_way_seconds: Delay in each direction.
        """
        self._one_way_seconds = one_way_seconds
        self.address = ""
        """Its address."""
        self.byte_count = 0
        """Bytes passed on, both directions together."""
        self._host = host
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        onward_reader, onward_writer = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, onward_writer]
        await asyncio.gather(self._pass_on(reader, onward_writer), self._pass_on(onward_reader, writer))

    def drop(self) -> None:
        """Close every connection."""
        for writer in self._writers:
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(_CHUNK_BYTES):
                self.byte_count += len(data)
                if self._one_way_seconds:
                    asyncio.get_running_loop().call_later(self._one_way_seconds, writer.write, data)
                    continue
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # one end is gone; so is the other in a moment
        finally:
            await asyncio.sleep(self._one_way_seconds)
            writer.close()


@asynccontextmanager
async def relay(address: str, one_way_seconds: float = 0.0) -> AsyncIterator[Relay]:
    """A relay to a server, with a delay in each direction."""
    host, _, port = address.rpartition(":")
    passing = Relay(host, int(port), one_way_seconds)
    server = await asyncio.start_server(passing.accept, "127.0.0.1")
    passing.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield passing
    finally:
        server.close()
        passing.drop()
