"""An answer that is not the protobuf of its method ends the call in one sentence, whoever asks, without a traceback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio
import pytest

from tandem.clients.admin_client import AdminClient
from tandem.clients.client import Client
from tandem.clients.sync_client import SyncClient
from tandem.errors import ProtocolError
from tandem.model.types import ChatMessage
from tandem.rpc.channels import open_channel
from tandem.serving.healthcheck import Health, check
from tandem_coordinator.transport.draft_client import DraftClient
from tandem_coordinator.transport.target_client import TargetClient
from tandem_load.fakes import FakeTarget

CHAT = [ChatMessage("user", "What is it?")]


class Garbled(grpc.GenericRpcHandler):
    """Answers all calls with bytes that are no message."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def answer(requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
            async for _ in requests:
                yield b"\xff"
                return

        return grpc.stream_stream_rpc_method_handler(answer)


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Garbled(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def generate(address: str) -> object:
    async with Client(address) as client:
        return await client.complete("def f(", max_tokens=1)


async def generate_many(address: str) -> object:
    async with Client(address) as client:
        return [each async for each in client.generate_many(["def f("], max_tokens=1)]


async def render(address: str) -> object:
    async with Client(address) as client:
        return await client.chat_prompt(CHAT)


async def wait(address: str) -> object:
    async with Client(address) as client:
        await client.wait_until_ready(30.0)
    return None


async def generate_in_thread(address: str) -> object:
    def complete() -> object:
        with SyncClient(address) as client:
            return client.complete("def f(", max_tokens=1)

    return await asyncio.to_thread(complete)


async def render_in_thread(address: str) -> object:
    def ask() -> object:
        with SyncClient(address) as client:
            return client.chat_prompt(CHAT)

    return await asyncio.to_thread(ask)


async def status(address: str) -> object:
    async with AdminClient(address) as client:
        return await client.status()


async def watch(address: str) -> object:
    async with AdminClient(address) as client:
        return [each async for each in client.watch_stats()]


async def describe_target(address: str) -> object:
    async with open_channel(address) as channel:
        return await TargetClient(channel).model_info()


async def describe_draft(address: str) -> object:
    async with open_channel(address) as channel:
        return await DraftClient(channel).model_info()


async def fetch_tokenizer(address: str) -> object:
    async with open_channel(address) as channel:
        return await TargetClient(channel).tokenizer_files()


async def map_vocabulary(address: str) -> object:
    async with open_channel(address) as channel:
        return await DraftClient(channel).map_vocabulary(FakeTarget().model_info, b"{}")


CALLS: list[tuple[str, Callable[[str], Awaitable[object]]]] = [
    ("tandem.v1.GenerationService/Generate", generate),
    ("tandem.v1.GenerationService/RenderChat", render),
    ("tandem.v1.GenerationService/GenerateBatch", generate_many),
    ("grpc.health.v1.Health/Check", wait),
    ("tandem.v1.GenerationService/Generate", generate_in_thread),
    ("tandem.v1.GenerationService/RenderChat", render_in_thread),
    ("tandem.v1.AdminService/GetStatus", status),
    ("tandem.v1.AdminService/WatchStats", watch),
    ("tandem.v1.TargetService/GetModelInfo", describe_target),
    ("tandem.v1.DraftService/GetModelInfo", describe_draft),
    ("tandem.v1.TargetService/GetTokenizer", fetch_tokenizer),
    ("tandem.v1.DraftService/MapVocabulary", map_vocabulary),
]


@pytest.mark.parametrize(("method", "call"), CALLS, ids=[call.__name__ for _, call in CALLS])
async def test_it_ends_the_call_in_one_sentence(
    method: str, call: Callable[[str], Awaitable[object]], address: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ProtocolError) as caught:
        await call(address)
    assert (
        str(caught.value) == f"the answer to /{method} cannot be read; it must be the protobuf of the method"
    )
    assert caplog.messages == []


async def test_a_health_check_of_it_finds_nobody(address: str) -> None:
    assert await asyncio.to_thread(check, address) is Health.UNREACHABLE
