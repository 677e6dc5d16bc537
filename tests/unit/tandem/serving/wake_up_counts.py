"""Counts how often gRPC's events wake the event loop of a server: `python -m tests.unit.tandem.serving.wake_up_counts`.

A process of its own, since `grpc.aio` has one socket for wake-ups in each process.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVarTuple

import grpc
import grpc.aio

from tandem.serving.server import serve
from tandem.settings import ServerSettings
from tests.unit.tandem.serving.served import Scripted

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

_Arguments = TypeVarTuple("_Arguments")

CALLS = 120
"""Fewer events than gRPC's socket has room for, so that its thread writes all bytes while the loop is held."""


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts the turns in which gRPC's socket was readable."""

    grpc_wake_ups = 0

    def add_reader(
        self, fd: FileDescriptorLike, callback: Callable[[*_Arguments], Any], *args: *_Arguments
    ) -> None:
        def counted() -> None:
            self.grpc_wake_ups += 1
            callback(*args)

        super().add_reader(fd, counted)


async def count() -> int:
    """Return how often the loop was woken for calls that all ended while it was held."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, CountingLoop)
    server = asyncio.create_task(serve(ServerSettings(port=0), Scripted()))
    await asyncio.sleep(0.2)
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/none/None")
        calls = [asyncio.ensure_future(call(b"", timeout=0.3, wait_for_ready=True)) for _ in range(CALLS)]
        await asyncio.sleep(0.1)
        before = loop.grpc_wake_ups
        time.sleep(0.6)  # noqa: ASYNC251 - a loop that is held up is what this is about
        ends = await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(0.2)  # bytes that were left wake it again
        found = loop.grpc_wake_ups - before
    assert all(isinstance(end, grpc.aio.AioRpcError) for end in ends), ends
    server.cancel()
    await asyncio.gather(server, return_exceptions=True)
    return found


def main() -> None:
    """Print the count."""
    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        sys.stdout.write(f"{runner.run(count())}\n")


if __name__ == "__main__":
    main()
