"""The relay that counts bytes."""

from __future__ import annotations

import asyncio

from benchmarks.timing.relay import relay


async def test_everything_is_passed_on_and_counted() -> None:
    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.readexactly(100_000)).upper())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(shout, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    async with relay(f"127.0.0.1:{port}") as between:
        host, _, own_port = between.address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(own_port))
        writer.write(b"a" * 100_000)
        answer = await reader.read(-1)
        writer.close()

    server.close()
    assert answer == b"A" * 100_000
    assert between.byte_count == 200_000
