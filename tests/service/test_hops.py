"""Each connection in turn breaks at any byte: the text is the same, or the error is typed."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

import pytest

from tandem.clients.client import Client
from tandem.engine.models.loading import LoadedModel
from tandem.errors import ServiceUnavailableError
from tandem.model.types import GenerationRequest
from tests.service.clients import complete
from tests.service.engines import Faults, services
from tests.service.fakes import coordinated

logger = logging.getLogger(__name__)
"""Logs the numbers for docs/measurements.md; `make soak` shows them."""

GREEDY = GenerationRequest(
    "def f(", max_tokens=16, temperature=0.0, num_speculative_tokens=3, ignore_eos=True
)
STRICT = replace(GREEDY, temperature=1.0, seed=5, rejection_sampling_strategy="strict")
HOPS = ("client", "draft", "target")
TEST_SECONDS = 120.0

_CHUNK_BYTES = 16_384


@dataclass
class FaultProxy:
    """Passes bytes on to a target, with the faults that are set at the moment."""

    target: str
    """host:port."""
    reset_after_bytes: int | None = None
    """Break a connection when so many more bytes have come back, whichever it is; once only."""
    address: str = ""
    passed_bytes: int = 0
    """From the target to its callers, over all connections."""
    resets: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _near: set[asyncio.StreamWriter] = field(default_factory=set)
    """To the callers of the connections that are open."""

    def accept(self, listener: socket.socket) -> None:
        task = asyncio.create_task(self._serve(listener.accept()[0]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def reset(self) -> None:
        """Break all connections."""
        for each in self._near:
            _reset(each)

    async def close(self) -> None:
        await asyncio.sleep(0)  # a task that is cancelled before it begins would leave its socket open
        await _cancel(*self._tasks)

    async def _serve(self, connection: socket.socket) -> None:
        """One connection, both ways, until either side ends it."""
        reader, writer = await asyncio.open_connection(sock=connection)
        host, _, port = self.target.rpartition(":")
        try:
            there_reader, there_writer = await asyncio.open_connection(host, int(port))
        except OSError:  # nobody is there
            writer.transport.abort()
            return
        ways = [
            asyncio.create_task(self._pass_on(reader, there_writer)),
            asyncio.create_task(self._pass_on(there_reader, writer, is_back=True)),
        ]
        self._near.add(writer)
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._near.discard(writer)
            await _cancel(*ways)
            for each in (there_writer, writer):
                each.transport.abort()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_back: bool = False
    ) -> None:
        """One direction. The one back to the caller counts bytes and may break the connection."""
        content = b"."
        with suppress(OSError):
            while content:
                content = await reader.read(_CHUNK_BYTES)
                if is_back:
                    self.passed_bytes += len(content)
                    if self.reset_after_bytes is not None:
                        if len(content) >= self.reset_after_bytes:
                            writer.write(content[: self.reset_after_bytes])
                            self.reset_after_bytes = None
                            self.resets += 1
                            _reset(writer)
                            return
                        self.reset_after_bytes -= len(content)
                writer.write(content)
                await writer.drain()


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection as a crash does: with a reset in place of a goodbye."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@asynccontextmanager
async def fault_proxy(target: str) -> AsyncIterator[FaultProxy]:
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


@asynccontextmanager
async def hops(
    model: LoadedModel, other_model: LoadedModel
) -> AsyncIterator[tuple[Client, dict[str, FaultProxy]]]:
    """A client, a coordinator, a draft and two targets, with proxies between all but the second target."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        targets, drafting = await enter(services(model, other_model, Faults(), Faults()))
        first, second = targets.split(",")
        to_target = await enter(fault_proxy(first))
        to_draft = await enter(fault_proxy(str(drafting)))
        near, _ = await enter(coordinated(f"{to_target.address},{second}", to_draft.address))
        to_coordinator = await enter(fault_proxy(near.address))
        client = await enter(Client(to_coordinator.address))
        yield client, {"client": to_coordinator, "draft": to_draft, "target": to_target}


@pytest.mark.parametrize("runs", [12, pytest.param(300, marks=pytest.mark.soak)])
@pytest.mark.parametrize("hop", HOPS)
async def test_a_reset_at_any_byte_changes_no_text(
    model: LoadedModel, other_model: LoadedModel, hop: str, runs: int
) -> None:
    """Between coordinator and services the reset is invisible to clients; a client's own reset is a typed error."""
    chance = random.Random(f"{hop} {runs}")
    seen = 0
    async with asyncio.timeout(TEST_SECONDS + runs), hops(model, other_model) as (client, proxies):
        proxy = proxies[hop]
        expected = await complete(client, STRICT)
        before = proxy.passed_bytes
        await asyncio.gather(*(complete(client, STRICT) for _ in range(2)))  # one on each target
        usual_bytes = (proxy.passed_bytes - before) // 2
        for _ in range(runs):
            proxy.reset_after_bytes = chance.randrange(1, max(2, usual_bytes))
            before = proxy.resets
            # Of two requests at once each target gets one; a single one would always go to the faster target.
            texts = await asyncio.gather(*(text_of(client, STRICT) for _ in range(1 + (hop == "target"))))
            # Only a reset of the client's own connection may be visible.
            assert set(texts) <= ({expected.text, None} if hop == "client" else {expected.text})
            seen += proxy.resets - before
            proxy.reset_after_bytes = None
    assert seen > 0, "the reset hit no connection in use"
    logger.info("%s: %d runs, %d resets while one ran", hop, runs, seen)


async def text_of(client: Client, request: GenerationRequest) -> str | None:
    """Return the completion; None if its connection breaks."""
    try:
        return (await complete(client, request)).text
    except ServiceUnavailableError:
        return None
